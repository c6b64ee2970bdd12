"""Pictures from the web: what is fetched, from whom, and where it ends."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from omlxd.engine.image_fetch import Address, Fetcher, is_public
from omlxd.engine.image_policy import ImagePolicy, PictureError
from omlxd.engine.images import open_picture


class Site(BaseHTTPRequestHandler):
    """Answers by the path that is asked for."""

    def do_GET(self) -> None:
        kind, _, rest = self.path.lstrip("/").partition("/")
        match kind:
            case "bytes":
                self._answer(200, b"x" * int(rest))
            case "to":
                self._answer(302, b"", ("Location", rest))
            case "round":
                self._answer(307, b"", ("Location", "/round"))
            case "unending" | "dripping":
                self._head(200)
                while not self.server.is_over.wait(0.01):  # type: ignore[attr-defined]
                    self.wfile.write(b"x" * (1000 if kind == "unending" else 1))
            case "slow":
                self._head(200, ("Content-Length", "1000"))
                while not self.server.is_over.wait(0.01):  # type: ignore[attr-defined]
                    self.wfile.write(b"x")
            case "short":
                self._head(200, ("Content-Length", "1000"))
                self.wfile.write(b"x" * 10)
            case "agent":
                self._answer(200, f"{self.headers['Host']} {self.headers['User-Agent']}".encode())
            case _:
                self._answer(404, b"nothing")

    def _answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self._head(status, ("Content-Length", str(len(body))), *headers)
        self.wfile.write(body)

    def _head(self, status: int, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Site)
        self.is_over = threading.Event()

    def handle_error(self, *_: object) -> None:
        """A client that hangs up is what these tests are about."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.is_over.set()
        server.shutdown()
        thread.join()


def is_here(address: Address) -> bool:
    return address == ipaddress.ip_address("127.0.0.1")


HERE = Fetcher(max_bytes=5000, allows=is_here)


def reason(url: str, fetcher: Fetcher = HERE) -> str:
    with pytest.raises(PictureError) as failed:
        fetcher.fetch(url)
    return failed.value.reason


def test_a_body_is_fetched_whole(site: str) -> None:
    assert HERE.fetch(f"{site}/bytes/5000") == b"x" * 5000


def test_it_says_who_asks_and_whom(site: str) -> None:
    assert HERE.fetch(f"{site}/agent").decode() == f"{site.removeprefix('http://')} omlxd"


def test_more_than_the_most_bytes_are_not_read(site: str) -> None:
    assert reason(f"{site}/bytes/5001") == "has 5001 bytes; the most is 5000"
    assert reason(f"{site}/unending") == "has more than 5000 bytes, the most allowed"


def test_a_server_that_drips_is_left_when_the_time_is_over(site: str) -> None:
    for path in ("slow", "dripping"):
        assert reason(f"{site}/{path}", replace(HERE, timeout_s=0.2)) == "did not answer within 0.2 s"


def test_a_body_that_is_cut_off_is_no_picture(site: str) -> None:
    assert "IncompleteRead" in reason(f"{site}/short")


def test_another_answer_than_a_picture_is_told(site: str) -> None:
    assert reason(f"{site}/nothing") == "was answered with 404 Not Found"


def test_redirects_are_followed_a_few_times(site: str) -> None:
    assert HERE.fetch(f"{site}/to/bytes/3".replace("/to/", "/to//")) == b"xxx"
    assert reason(f"{site}/round") == "redirects more than 3 times"


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/a.png", "data:image/png;base64,AAAA"])
def test_a_redirect_leads_to_the_web_or_nowhere(site: str, target: str) -> None:
    assert "which is no web address" in reason(f"{site}/to/{target}")


def test_a_redirect_to_an_address_that_is_not_allowed_is_not_followed(site: str) -> None:
    assert reason(f"{site}/to/http://127.0.0.2/a.png") == "is at 127.0.0.2, which is no public address"


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:4700::1111"])
def test_an_address_that_everybody_can_reach_is_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "0.0.0.0", "224.0.0.1", "100.64.0.1"),
        *("::1", "::", "fe80::1", "fd00::1", "::ffff:127.0.0.1", "::ffff:192.168.0.1", "ff02::1"),
    ],
)
def test_an_address_that_only_some_can_reach_is_not(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/", "http://localhost/", "http://[::1]/", "http://2130706433/"])
def test_this_machine_is_not_asked(url: str) -> None:
    with pytest.raises(PictureError, match="no public address"):
        open_picture(url, ImagePolicy(allow_urls=True))


@pytest.mark.parametrize("url", ["http://", "http://[::1/", "http://x:99999/", "https://\udcff/"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(PictureError):
        open_picture(url, ImagePolicy(allow_urls=True))
