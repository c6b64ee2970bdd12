"""Signals, second starts, idle ends and clocks that jump, while a real daemon is at work."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omlxd.rpc.client import Call, Client, RpcError
from tests.compiled import library
from tests.e2e.living import DAEMON, Daemon, daemon_in_new_home, until
from tests.models import write

LONG: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
HOME_AFTERWARDS = {"config.toml", "config.toml.lock", "logs", "models", "omlxd.lock", "stderr", "cache", "sessions"}


@pytest.fixture
def home() -> Iterator[Daemon]:
    """Not started yet."""
    with daemon_in_new_home() as living:
        write("llama", living.models / "tiny", eos=[])
        yield living


def streaming(client: Client) -> Call:
    """A long generation that has sent its first words."""
    call = client.start("generate.complete", {**LONG, "stream": True})
    next(value for value in call if value["kind"] == "delta")
    return call


def text_of(call: Call) -> str:
    return str(call.result(timeout_s=60)["text"])


def end_of(call: Call) -> str:
    """How it was answered; there must be an answer."""
    try:
        call.result(timeout_s=30)
    except RpcError as error:
        return str(error.data["kind"])
    return "answered"


# -- signals and starts -----------------------------------------------------------------------------------------------


def test_a_second_start_during_a_stream_leaves_it_unharmed(home: Daemon) -> None:
    home.start()
    whole = home.call("generate.complete", **LONG)["text"]
    with home.client() as client:
        call = streaming(client)
        second = subprocess.run(DAEMON, env=home.home.env, capture_output=True, text=True, timeout=60)
        assert home.process is not None
        assert (second.returncode, f"pid {home.process.pid}" in second.stderr) == (1, True)
        assert text_of(call) == whole
    assert home.call("daemon.info")["pid"] == home.process.pid


def test_a_hang_up_signal_during_a_stream_reloads_the_settings_and_leaves_it_unharmed(home: Daemon) -> None:
    home.start()
    whole = home.call("generate.complete", **LONG)["text"]
    with home.client() as client:
        call = streaming(client)
        assert home.process is not None
        for _ in range(20):
            home.process.send_signal(signal.SIGHUP)
        assert text_of(call) == whole
    until(lambda: "settings read again" in home.log)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_whatever_runs_when_a_stop_comes_is_answered_once_and_nothing_is_left_behind(
    home: Daemon, number: signal.Signals
) -> None:
    home.start(OMLXD_DAEMON__GRACE_S="0")
    with home.client() as client:
        first = streaming(client)
        prefilling = client.start("generate.complete", {**LONG, "prompt": [7] * 500, "max_tokens": 10})
        loading = client.start("models.load", {"model": "tiny", "pin": True})
        pulling = client.start("models.pull", {"source": str(home.models / "tiny"), "name": "copy"})
        assert home.process is not None
        home.process.send_signal(number)
        for call in (first, prefilling, loading, pulling):
            assert end_of(call) in ("answered", "shutting_down")
    assert home.process.wait(30) == 0
    assert set(os.listdir(home.home.path)) <= HOME_AFTERWARDS
    assert set(os.listdir(home.models)) <= {"tiny", "copy", ".pull"}
    assert [path for path in (home.models / ".pull").rglob("*") if path.suffix != ".lock"] == []


# -- idle -------------------------------------------------------------------------------------------------------------


def test_an_idle_daemon_ends_with_0_and_the_next_one_serves(home: Daemon) -> None:
    home.start(OMLXD_DAEMON__IDLE_EXIT_S="0.5")
    home.call("generate.complete", **{**LONG, "max_tokens": 5})
    assert home.process is not None
    assert home.process.wait(30) == 0
    assert not os.path.exists(home.home.socket)
    assert "daemon.idle_exit_s" in home.log
    home.start()
    assert home.call("ping") == "pong"


def test_a_stream_longer_than_the_limit_is_no_idleness(home: Daemon) -> None:
    home.start(OMLXD_DAEMON__IDLE_EXIT_S="0.05")
    with home.client() as client:
        assert len(text_of(client.start("generate.complete", LONG))) > 0
    assert home.process is not None
    assert home.process.wait(30) == 0


def test_a_command_finds_a_daemon_again_after_an_idle_end(home: Daemon) -> None:
    env = {"OMLXD_DAEMON__IDLE_EXIT_S": "0.2", "HF_HUB_CACHE": str(home.home.path / "none")}
    for _ in range(3):  # some of these meet one that is just ending
        outcome = home.home.run("run", "tiny", "hello", "--max-tokens", "3", env=env)
        assert outcome.code == 0, outcome
    until(lambda: not os.path.exists(home.home.socket))


# -- clocks -----------------------------------------------------------------------------------------------------------


def test_a_wall_clock_that_jumps_ends_nothing_and_makes_no_duration_negative(home: Daemon, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    fake = library(Path(__file__).with_name("fake_clock.c"), tmp_path)
    home.start(LD_PRELOAD=str(fake), FAKE_CLOCK=str(clock), OMLXD_MODELS__TTL_S="600")
    whole = home.call("generate.complete", **LONG)["text"]
    for jump in (86_400, -86_400, -1_700_000_000):
        with home.client() as client:
            call = streaming(client)
            clock.write_text(str(jump))
            assert text_of(call) == whole
        status = home.call("daemon.status")
        assert [model["state"] for model in status["models"]] == ["READY"]
        assert status["info"]["uptime_s"] >= 0
        timings = home.call("generate.complete", **{**LONG, "max_tokens": 3})["timings"]
        assert min(timings.values()) >= 0
        shown = home.home.run("status")
        said = shown.text.replace(str(home.home.path), "")  # a temporary name may read like a duration
        assert (shown.code, re.search(r"-\d+[smhd]", said)) == (0, None)
