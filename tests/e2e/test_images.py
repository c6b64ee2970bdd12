"""Pictures from end to end: a real daemon, tiny vision models, and the command line."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from omlxd.rpc.client import RpcError
from tests.e2e.living import Daemon, daemon_in_new_home
from tests.models import write
from tests.vision_models import QWEN_UNIT, picture
from tests.vision_models import write as write_vision

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SIZE = (8 * QWEN_UNIT, 8 * QWEN_UNIT)  # 64 tokens


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon with a vision model and a text model, blocks of 16 tokens, and a folder of pictures it may read."""
    with daemon_in_new_home() as living:
        write_vision("qwen2_vl", living.models / "seeing", eos=[])
        write("llama", living.models / "reading", eos=[])
        folder = living.home.path / "pictures"
        folder.mkdir()
        (living.home.path / "config.toml").write_text(
            f'[images]\nallow_paths = ["{folder}"]\n[cache]\nblock_size = 16\n'
        )
        living.start()
        yield living


def png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def showing(*sources: str, text: str = "What is this?") -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": source}} for source in sources]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def chat(daemon: Daemon, messages: list[dict[str, Any]], **more: Any) -> Any:
    return daemon.call("generate.chat", model="seeing", messages=messages, **GREEDY, **more)


def test_a_picture_is_found_again_from_every_source_and_another_one_is_not(daemon: Daemon) -> None:
    image = picture(1, SIZE)
    path = daemon.home.path / "pictures" / "a.png"
    path.write_bytes(png(image))
    first = chat(daemon, showing(str(path)), return_token_ids=True)
    assert first["usage"]["cached_tokens"] == 0
    assert first["usage"]["prompt_tokens"] > 64
    for source in (data_url(image), base64.b64encode(png(image)).decode(), path.as_uri()):
        again = chat(daemon, showing(source), return_token_ids=True)
        assert again["usage"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1
        assert again["token_ids"] == first["token_ids"]
    other = chat(daemon, showing(data_url(picture(2, SIZE))), return_token_ids=True)
    assert other["usage"]["cached_tokens"] < 40  # the text before the picture
    assert other["token_ids"] != first["token_ids"]
    assert chat(daemon, showing(data_url(image)), return_token_ids=True)["token_ids"] == first["token_ids"]


def test_omlxctl_shows_a_picture_from_a_file_that_the_daemon_may_not_read(daemon: Daemon, tmp_path: Path) -> None:
    image = picture(3, SIZE)
    (tmp_path / "b.png").write_bytes(png(image))
    flags = ("--temperature", "0", "--max-tokens", "6", "--ignore-eos", "--json")
    outcome = daemon.home.run("run", "seeing", "What is this?", "--image", str(tmp_path / "b.png"), *flags)
    assert outcome.code == 0, outcome
    assert outcome.document["text"] == chat(daemon, showing(data_url(image)))["text"]
    assert outcome.document["usage"]["prompt_tokens"] > 64


def test_the_same_text_with_two_pictures_is_stored_twice_from_the_first_picture_on(daemon: Daemon) -> None:
    for look in (3, 4):
        chat(daemon, showing(data_url(picture(look, SIZE))))
    nodes = daemon.call("cache.inspect", model="seeing")["nodes"]
    first = [node for node in nodes if node["start"] == 0 and "<|vision_start|>" in node["text_preview"]]
    assert len({node["key"] for node in first}) == len(first) >= 2
    assert len({node["text_preview"] for node in first}) == 1
    assert daemon.home.run("cache", "inspect", "seeing").code == 0


def test_explain_tells_that_the_picture_is_another(daemon: Daemon) -> None:
    image, other = picture(10, SIZE), picture(11, SIZE)
    computed = chat(daemon, showing(data_url(image)))["usage"]["prompt_tokens"]
    same = daemon.call("cache.explain", model="seeing", messages=showing(data_url(image)))
    assert (same["reason"], same["matched_tokens"]) == ("full", computed - 1)
    differs = daemon.call("cache.explain", model="seeing", messages=showing(data_url(other)))
    assert differs["reason"] == "differs"
    assert differs["matched_tokens"] == differs["differs_at"]["token"] < 30  # the text before the picture
    assert differs["differs_at"]["stored_text"] == "another picture"


def test_a_warmed_picture_is_there_for_the_request(daemon: Daemon) -> None:
    messages = showing(data_url(picture(12, SIZE)))
    warmed = daemon.call("cache.warm", model="seeing", messages=messages)
    assert chat(daemon, messages)["usage"]["cached_tokens"] == warmed["prompt_tokens"] - 1


def test_a_picture_that_the_processor_refuses_ends_its_own_request_alone(daemon: Daemon) -> None:
    # SC-23: three good ones and a bad one together
    good = [showing(data_url(picture(look, SIZE))) for look in (6, 7, 8)]
    alone = [chat(daemon, messages)["text"] for messages in good]
    flat = showing(data_url(picture(9, (600, 1))))
    with ThreadPoolExecutor(4) as pool:
        together = [pool.submit(chat, daemon, messages) for messages in good]
        with pytest.raises(RpcError, match="refused its pictures") as refused:
            chat(daemon, flat)
        assert [each.result()["text"] for each in together] == alone
    assert refused.value.code == -32602


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("data:image/png;base64,AAAA", -32602, "send PNG, JPEG, WebP or GIF"),
        (data_url(Image.new("1", (8000, 8000))), -32602, "64000000 pixels; the most is 40000000"),
        ("/etc/passwd", -32021, "images.allow_paths"),
        ("https://example.com/a.png", -32021, "images.allow_urls"),
    ],
    ids=["no picture", "too large", "another path", "the web"],
)
def test_a_picture_that_is_refused_has_a_typed_error(daemon: Daemon, source: str, code: int, words: str) -> None:
    with pytest.raises(RpcError, match=words) as refused:
        chat(daemon, showing(source))
    assert refused.value.code == code
    if code == -32602:
        assert refused.value.data["field"] == "messages[0].content[0].image_url.url"


def test_a_model_that_takes_text_refuses_a_picture_unread(daemon: Daemon) -> None:
    with pytest.raises(RpcError, match="this model takes text") as refused:
        daemon.call("generate.chat", model="reading", messages=showing("/etc/passwd"))
    assert refused.value.data["kind"] == "unsupported"


def test_the_catalog_tells_the_kinds_apart(daemon: Daemon) -> None:
    kinds = {entry["name"]: entry["kind"] for entry in daemon.call("models.list")}
    assert (kinds["seeing"], kinds["reading"]) == ("vision", "text")


def test_the_log_holds_nothing_of_a_picture(daemon: Daemon) -> None:
    url = data_url(picture(5, SIZE))
    chat(daemon, showing(url))
    assert url[40:80] not in daemon.log
    assert "Traceback" not in daemon.log
