"""`--image` and `/image`: what is sent of a file, and which files are not."""

import base64
from pathlib import Path

import pytest

from omlxd.cli.errors import UsageError
from omlxd.cli.pictures import MAX_BYTES, content_with, picture_url
from omlxd.engine.api import ChatPrompt, GenerateRequest, Json, Unsupported
from tests.cli.running import Home
from tests.cli.serving import Daemon
from tests.fakes import FakeGeneration, answering, refusing

PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)
JPEG = b"\xff\xd8\xff" + bytes(8)


def url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def shown(*urls: str, text: str) -> list[Json]:
    return [*({"type": "image_url", "image_url": {"url": each}} for each in urls), {"type": "text", "text": text}]


def contents(request: GenerateRequest) -> list[Json]:
    assert isinstance(request.prompt, ChatPrompt)
    return [message["content"] for message in request.prompt.messages if message["role"] == "user"]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.jpg").write_bytes(JPEG)
    (tmp_path / "a.txt").write_text("no picture")
    return tmp_path


def seeing(request: GenerateRequest) -> FakeGeneration:
    return answering("a cat")


def test_run_sends_the_pictures_in_their_order_and_then_the_prompt(home: Home, daemon: Daemon, files: Path) -> None:
    daemon.backend.script = seeing
    images = ("--image", str(files / "b.jpg"), "--image", str(files / "a.png"))
    assert home.run("run", "tiny", "What is this?", *images).text == "a cat\n"
    [request] = daemon.backend.requests
    assert contents(request) == [shown(url(JPEG, "image/jpeg"), url(PNG, "image/png"), text="What is this?")]


def test_a_file_that_is_missing_or_no_picture_is_a_usage_error_and_nothing_is_sent(home: Home, files: Path) -> None:
    outcome = home.run("run", "hi", "--image", str(files / "none.png"))  # there is no daemon, and none is started
    assert (outcome.code, outcome.errors) == (2, [f"error: --image {files}/none.png: No such file or directory"])
    assert not home.path.exists()


def test_a_model_without_a_template_is_not_given_the_prompt_without_its_pictures(
    home: Home, daemon: Daemon, files: Path
) -> None:
    daemon.backend.script = lambda request: refusing(Unsupported("chat", "the model has no chat template"))
    assert home.run("run", "hi", "--image", str(files / "a.png")).code == 1
    assert len(daemon.backend.requests) == 1


def test_a_picture_over_the_frame_is_refused_with_the_number(home: Home, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG + bytes(MAX_BYTES - len(PNG)))  # a third more in base64
    outcome = home.run("run", "hi", "--image", str(tmp_path / "a.png"))
    assert (outcome.code, len(outcome.errors)) == (1, 1)
    assert "67108864 bytes" in outcome.errors[0]


def test_chat_shows_a_picture_with_the_next_message_only(home: Home, daemon: Daemon, files: Path) -> None:
    daemon.backend.script = seeing
    lines = f"one\n/image {files}/b.jpg\ntwo\nthree\n".encode()
    assert home.run("chat", "tiny", "--image", str(files / "a.png"), stdin=lines).code == 0
    first, second = shown(url(PNG, "image/png"), text="one"), shown(url(JPEG, "image/jpeg"), text="two")
    assert contents(daemon.backend.requests[-1]) == [first, second, "three"]


def test_in_a_piped_chat_a_file_that_is_no_picture_ends_the_session(home: Home, daemon: Daemon, files: Path) -> None:
    for line, reason in ((f"/image {files}/a.txt", "is not a PNG"), ("/image", "takes the path")):
        outcome = home.run("chat", "tiny", stdin=f"{line}\nhi\n".encode())
        assert outcome.code == 2
        assert reason in outcome.errors[0]
    assert daemon.backend.requests == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [("a.txt", "is not a PNG"), (".", "is not a file"), ("a\0.png", "null byte"), ("\udcff", "text")],
)
def test_what_is_no_picture_file_is_named_with_the_reason(files: Path, name: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        picture_url(f"{files}/{name}")


def test_a_file_over_the_most_bytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(UsageError, match=f"has {MAX_BYTES + 1} bytes; the most is {MAX_BYTES}"):
        picture_url(str(tmp_path / "a.png"))


def test_a_web_address_is_left_to_the_daemon() -> None:
    assert picture_url("https://example.com/a.png") == "https://example.com/a.png"


def test_a_message_without_pictures_is_its_text() -> None:
    assert content_with("hi", []) == "hi"
