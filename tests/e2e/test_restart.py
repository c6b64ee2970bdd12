"""What one daemon has computed the next one finds: after a stop, and after a kill."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.living import Daemon, until

WORDS = " ".join(f"word{n}" for n in range(60))


def generate(daemon: Daemon, prompt: str = WORDS):
    return daemon.call(
        "generate.complete", model="tiny", prompt=prompt, max_tokens=8, temperature=0, return_token_ids=True
    )


def is_written(daemon: Daemon) -> bool:
    ssd = daemon.call("daemon.status")["cache"]["ssd"]
    return ssd["queued_bytes"] == 0 and ssd["counts"].get("written", 0) > 0


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
