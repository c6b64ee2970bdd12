"""What one daemon has computed the next one finds: after a stop, and after a kill."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.e2e.living import Daemon, daemon_in_new_home, until
from tests.models import MODELS, write

WORDS = " ".join(f"word{n}" for n in range(60))


LONGER = WORDS + " and more"


def generate(daemon: Daemon, prompt: str = WORDS, model: str = "tiny", **params: Any) -> Any:
    return daemon.call(
        "generate.complete", model=model, prompt=prompt, max_tokens=8, temperature=0, return_token_ids=True, **params
    )


def is_written(daemon: Daemon) -> bool:
    ssd = daemon.call("daemon.status")["cache"]["ssd"]
    return ssd["queued_bytes"] == 0 and ssd["counts"].get("written", 0) > 0


def test_every_layouts_next_daemon_finds_what_this_one_has_computed_after_a_stop_and_after_a_kill():
    """One daemon after the other with all models: `cached_tokens` and tokens as if it had never stopped."""
    with daemon_in_new_home() as daemon:
        for name in MODELS:
            write(name, daemon.models / name, eos=[])
        daemon.start()
        first = {name: generate(daemon, model=name) for name in MODELS}
        cold = {name: generate(daemon, LONGER, model=name, cache=False) for name in MODELS}
        until(lambda: is_written(daemon))
        for ending in (signal.SIGTERM, signal.SIGKILL):
            daemon.signal(ending)
            daemon.start()
            for name in MODELS:
                again = generate(daemon, model=name)
                assert again["usage"]["cached_tokens"] == first[name]["usage"]["prompt_tokens"] - 1, name
                assert again["token_ids"] == first[name]["token_ids"], name
                assert again["timings"]["fetch_ms"] > 0, name
        for name in MODELS:
            longer = generate(daemon, LONGER, model=name)
            assert longer["usage"]["cached_tokens"] >= first[name]["usage"]["prompt_tokens"] - 1, name
            assert longer["token_ids"] == cold[name]["token_ids"], name


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_the_next_daemon_finds_what_this_one_has_computed(daemon, ending):
    first = generate(daemon)
    assert first["usage"]["cached_tokens"] == 0
    until(lambda: is_written(daemon))
    daemon.signal(ending)
    daemon.start()
    again = generate(daemon)
    assert again["token_ids"] == first["token_ids"]
    assert again["usage"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1
    assert again["timings"]["fetch_ms"] > 0
    (line,) = daemon.call("cache.stats", model="tiny")
    assert line["blocks"]["ssd"] > 0
    assert line["bytes"]["ssd"] > 0
    assert daemon.call("cache.clear", model="tiny", tier="ssd")["freed_bytes"] > 0
    (line,) = daemon.call("cache.stats", model="tiny")
    assert line["blocks"]["ssd"] == 0
