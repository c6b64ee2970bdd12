"""Pictures from the web: a GET over HTTP or HTTPS, bounded in bytes, time and redirects, to public addresses only.

For a worker thread; blocks up to `timeout_s`. What asks for the picture may be a text that a model was fed, so nothing
that only this machine can reach is fetched: each hop's address is looked up once, checked, and then connected to.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import SplitResult, urljoin, urlsplit

from omlxd.engine.image_policy import PictureError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_REDIRECTS = {301, 302, 303, 307, 308}
_MAX_REDIRECTS = 3


def is_public(address: Address) -> bool:
    """Whether everybody can reach this address, so that fetching from it lends nobody this machine's place."""
    plain = address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address
    return plain.is_global and not plain.is_multicast


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Fetches at most `max_bytes` in at most `timeout_s` for each hop, from addresses that `allows` lets through."""

    max_bytes: int
    timeout_s: float = 10.0
    allows: Callable[[Address], bool] = is_public

    def fetch(self, url: str) -> bytes:
        """Raises PictureError."""
        for _ in range(_MAX_REDIRECTS + 1):
            try:
                answer = self._get(_split(url))
            except TimeoutError:
                raise PictureError(f"did not answer within {self.timeout_s:g} s") from None
            except (OSError, http.client.HTTPException, ValueError) as exc:
                raise PictureError(f"cannot be fetched: {exc or type(exc).__name__}") from None
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
        raise PictureError(f"redirects more than {_MAX_REDIRECTS} times")

    def _get(self, parts: SplitResult) -> bytes | str:
        """The body, or where it redirects to."""
        host, is_secure = parts.hostname or "", parts.scheme == "https"
        port = parts.port or (443 if is_secure else 80)
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        address = self._address(host, port)
        with (
            closing(kind(host, port)) as connection,
            socket.create_connection((str(address), port), timeout=self.timeout_s) as plain,
            _Alarm(plain, self.timeout_s) as alarm,
        ):
            connection.sock = (
                ssl.create_default_context().wrap_socket(plain, server_hostname=host) if is_secure else plain
            )
            target = (parts.path or "/") + ("?" + parts.query if parts.query else "")
            try:
                connection.request("GET", target, headers={"User-Agent": "omlxd", "Accept": "image/*"})
                with connection.getresponse() as response:
                    answer = self._answer(response)
            except (OSError, http.client.HTTPException):
                alarm.check()
                raise
            alarm.check()  # a body without a length has then only seemed to end
            return answer

    def _address(self, host: str, port: int) -> Address:
        """The one that is connected to: checked here, so that a second look-up cannot give another."""
        found = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        refused = next((address for address in found if not self.allows(address)), None)
        if refused is not None:
            raise PictureError(f"is at {refused}, which is no public address")
        return found[0]

    def _answer(self, response: http.client.HTTPResponse) -> bytes | str:
        where = response.headers.get("Location")
        if response.status in _REDIRECTS and where:
            return where
        if response.status != http.client.OK:
            raise PictureError(f"was answered with {response.status} {response.reason}")
        if response.length is not None and response.length > self.max_bytes:
            raise PictureError(f"has {response.length} bytes; the most is {self.max_bytes}")
        body = response.read(self.max_bytes + 1)
        if len(body) > self.max_bytes:
            raise PictureError(f"has more than {self.max_bytes} bytes, the most allowed")
        if response.length:
            raise http.client.IncompleteRead(body, response.length)
        return body


class _Alarm:
    """Hangs up after so many seconds. A socket's own timeout would start again with every byte."""

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._line = connected.dup()  # TLS takes the first one's descriptor over
        self._rang = threading.Event()
        self._timer = threading.Timer(timeout_s, self._ring)
        self._timer.daemon = True

    def __enter__(self) -> _Alarm:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
        self._timer.join()
        self._line.close()

    def check(self) -> None:
        """Raises TimeoutError when it has rung."""
        if self._rang.is_set():
            raise TimeoutError

    def _ring(self) -> None:
        self._rang.set()
        with suppress(OSError):  # the other end has hung up first
            self._line.shutdown(socket.SHUT_RDWR)


def _split(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PictureError(f"leads to {url[:200]!r}, which is no web address")
    return parts
