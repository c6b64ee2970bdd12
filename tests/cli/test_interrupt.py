"""Ctrl-C: the request is cancelled, its answer awaited, the code is 130."""

import json
import signal
import subprocess
import threading

import pytest

from omlxd.engine.api import Delta
from tests.cli.running import OMLXCTL, Home, Terminal
from tests.cli.serving import Daemon
from tests.fakes import FakeGeneration


def test_sigint_while_streaming_cancels_the_request_and_ends_with_130(home: Home, daemon: Daemon) -> None:
    answer = daemon.answer()
    with home.start("run", "hi") as process:
        answer.push("one two")
        assert process.stdout.read(7) == b"one two"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, b"\n", b"error: interrupted\n")
    answer.wait_cancelled()
    assert home.run("ping").text == "pong\n"


def test_with_json_the_document_has_what_was_generated_so_far(home: Home, daemon: Daemon) -> None:
    answer = daemon.answer()
    with home.start("run", "hi", "--json") as process:
        answer.push("one two")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    error = json.loads(out)["error"]
    assert (error["code"], error["message"]) == (-32800, "interrupted")
    assert error["data"]["partial"]["text"] == "one two"


def test_sigint_while_a_model_loads_gives_the_load_up(home: Home, daemon: Daemon) -> None:
    loading = daemon.hold_loads()
    with home.start("load", "tiny") as process:
        assert loading.wait(30)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"error: interrupted\n")
    assert daemon.backend.given_up == 1


@pytest.mark.parametrize("command", [["rpc", "models.load", '{"model": "tiny"}']])
def test_sigint_cancels_a_raw_call_too(home: Home, daemon: Daemon, command: list[str]) -> None:
    loading = daemon.hold_loads()
    with home.start(*command) as process:
        assert loading.wait(30)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert daemon.backend.given_up == 1


class Deaf(FakeGeneration):
    """Does not end when it is cancelled; `heard` is set."""

    def __init__(self, heard: threading.Event) -> None:
        super().__init__()
        self.heard = heard
        self.push(Delta("x"))

    def cancel(self, reason: str | None = None) -> None:
        self.heard.set()


@pytest.mark.parametrize("presses", [1, 2])
def test_a_daemon_that_does_not_stop_is_left_after_two_seconds_or_a_second_press(
    home: Home, daemon: Daemon, presses: int
) -> None:
    heard = threading.Event()
    daemon.backend.script = lambda request: Deaf(heard)
    with home.start("run", "hi") as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        if presses == 2:
            assert heard.wait(30)
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"error: interrupted\n")


def test_a_typed_ctrl_c_leaves_the_terminal_on_a_new_line(home: Home, daemon: Daemon) -> None:
    answer = daemon.answer()
    terminal = Terminal(home, "run", "hi")
    answer.push("one")
    terminal.wait_for(b"one")
    terminal.type(b"\x03")
    assert terminal.end() == 130
    terminal.close()
    assert terminal.seen.endswith(b"\r\nerror: interrupted\r\n")


def test_where_interrupts_are_ignored_they_stay_ignored(home: Home, daemon: Daemon) -> None:
    # A script's `omlxctl run ... &` is started that way: the terminal's Ctrl-C is not for it.
    answer = daemon.answer()
    with subprocess.Popen(
        ["bash", "-c", "trap '' INT; exec \"$@\"", "-", *OMLXCTL, "run", "hi"], env=home.env, stdout=subprocess.PIPE
    ) as process:
        answer.push("one")
        assert process.stdout.read(3) == b"one"
        process.send_signal(signal.SIGINT)
        answer.push(" two")
        answer.finish()
        assert process.stdout.read() == b" two\n"
    assert process.returncode == 0
