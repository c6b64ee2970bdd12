"""A conversation with pictures under a name: it outlives kill -9, goes out as a file, and answers nobody else."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.living import Daemon, daemon_in_new_home
from tests.e2e.test_images import data_url
from tests.vision_models import picture, write

ASK = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
FAMILIES = ("qwen2_vl", "gemma3")
ONE, OTHER = (data_url(picture(look, (140, 84))) for look in (1, 2))


def showing(url: str) -> list[dict[str, Any]]:
    parts = [
        {"type": "text", "text": "Look at this picture: "},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is it?"},
    ]
    return [{"role": "user", "content": parts}]


def further(url: str) -> list[dict[str, Any]]:
    """The same, answered, with another picture in the next question."""
    return [*showing(url), {"role": "assistant", "content": "A thing."}, *showing(OTHER)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with daemon_in_new_home() as living:
        for family in FAMILIES:
            write(family, living.models / family, eos=[])
        (living.home.path / "config.toml").write_text("[cache]\nblock_size = 16\n")
        living.start()
        yield living


def answer(daemon: Daemon, family: str, url: str, **more: Any) -> tuple[list[int], int]:
    """The answer's ids, and how many tokens of the prompt were there already."""
    result = daemon.call("generate.chat", model=family, messages=further(url), **ASK, **more)
    return result["token_ids"], result["usage"]["cached_tokens"]


def test_a_session_with_a_picture_goes_on_after_kill_9_and_from_a_file(daemon: Daemon) -> None:
    cold = {(family, url): answer(daemon, family, url, cache=False)[0] for family in FAMILIES for url in (ONE, OTHER)}
    files = {family: str(daemon.home.path / f"{family}.safetensors") for family in FAMILIES}
    saved = {}
    for family in FAMILIES:
        entry = daemon.call("sessions.save", model=family, name="album", messages=showing(ONE))
        saved[family] = entry["tokens"]
        daemon.call("sessions.export", model=family, name="album", path=files[family])
    daemon.signal(signal.SIGKILL)
    daemon.start()
    for family in FAMILIES:
        assert answer(daemon, family, ONE, session="album") == (cold[family, ONE], saved[family])
        daemon.call("sessions.delete", model=family, name="album")
    daemon.call("cache.clear")
    for family in FAMILIES:
        assert daemon.call("sessions.import", model=family, name="album", path=files[family])["tokens"] == saved[family]
        assert answer(daemon, family, ONE, session="album") == (cold[family, ONE], saved[family])
        ids, reused = answer(daemon, family, OTHER, session="album")
        assert ids == cold[family, OTHER]
        assert reused < saved[family] // 2  # the text before the picture, at most
        assert answer(daemon, family, ONE, session="album")[0] == cold[family, ONE]
    assert "stays where it was" not in daemon.log
