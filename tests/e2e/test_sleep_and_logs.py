"""A machine that sleeps while a model loads or reads a prompt, and a log that a flood of failures does not fill."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests.e2e.living import Daemon, daemon_in_new_home
from tests.models import write

SLEEP_S = 3.0
FAILURES = 5000


@pytest.fixture
def sleeper() -> Iterator[Daemon]:
    """A daemon whose model's time to live is shorter than the sleep."""
    with daemon_in_new_home() as living:
        write("llama", living.models / "tiny", eos=[], context=8192)
        living.start(OMLXD_MODELS__TTL_S="2")
        yield living


def sleep(daemon: Daemon) -> None:
    """Stops the process and lets it go on, as a closed lid does to all."""
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    time.sleep(SLEEP_S)  # the sleep itself is what is tested
    daemon.process.send_signal(signal.SIGCONT)


def test_a_sleep_during_a_load_ends_nothing(sleeper: Daemon) -> None:
    with sleeper.client() as client:
        loading = client.start("models.load", {"model": "tiny"})
        sleep(sleeper)
        assert loading.result(timeout_s=60)["state"] == "READY"
        assert client.call("ping", timeout_s=10) == "pong"


def test_a_sleep_while_a_prompt_is_computed_ends_nothing(sleeper: Daemon) -> None:
    prompt = [n % 250 + 1 for n in range(6000)]
    params = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    with sleeper.client() as client:
        call = client.start("generate.complete", params)
        next(value for value in call if value.get("phase") == "prefill")
        sleep(sleeper)
        result = call.result(timeout_s=100)
        assert result["usage"]["prompt_tokens"] == 6000
        assert client.call("ping", timeout_s=10) == "pong"
        assert all(value >= 0 for value in result["timings"].values())


def test_a_flood_of_failing_requests_does_not_fill_the_log() -> None:
    with daemon_in_new_home() as living:
        living.start(OMLXD_LOG__MAX_BYTES="64KB", OMLXD_LOG__KEEP="2")
        request = {"jsonrpc": "2.0", "method": "generate.complete", "params": {"model": "none", "prompt": "x"}}
        frame = json.dumps([{**request, "id": id} for id in range(100)]) + "\n"
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(living.home.socket)
            answers = raw.makefile("rb")
            for _ in range(FAILURES // 100):
                raw.sendall(frame.encode())
                assert answers.readline().count(b"model_not_found") == 100
        written = sum(path.stat().st_size for path in (living.home.path / "logs").iterdir())
        assert written <= 3 * 64 * 1024 + 4096
        assert (living.home.path / "stderr").stat().st_size <= 64 * 1024
