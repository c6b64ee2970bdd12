"""Starting a daemon in the background. The real one is started in tests of the whole; here a few lines play it."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from omlxd.cli.console import Console
from omlxd.cli.errors import Unreachable
from omlxd.cli.start import start_daemon
from omlxd.daemon.paths import Paths
from tests.cli.running import Home

SERVES = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.environ["OMLXD_HOME"] + "/omlxd.sock")
listener.listen()
print("session", os.getsid(0) == os.getpid(), "stdin", os.read(0, 1), flush=True)
while listener.accept()[0].recv(1) != b"q":
    pass
"""
GIVES_WAY = """
import os, sys
print("already running: another daemon holds the lock", file=sys.stderr)
sys.exit(1)
"""


def start(home: Home, code: str) -> None:
    console = Console(json=False, quiet=True)
    start_daemon(Paths.from_env(home.env), home.env, console, (sys.executable, "-c", code))


@pytest.fixture
def served(home: Home) -> Iterator[Home]:
    yield home
    quit_daemon(home)


def quit_daemon(home: Home) -> None:
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(home.socket)
        connected.sendall(b"q")


def output(home: Home) -> str:
    return (home.path / "logs" / "omlxd.out").read_text()


def test_it_returns_when_the_socket_answers_and_the_daemon_has_a_session_of_its_own(served: Home) -> None:
    start(served, SERVES)
    assert output(served) == "session True stdin b''\n"
    assert served.path.stat().st_mode & 0o777 == 0o700


def test_one_that_ends_is_reported_with_its_last_words_and_code(home: Home) -> None:
    with pytest.raises(Unreachable, match="ended with code 1") as caught:
        start(home, GIVES_WAY)
    assert caught.value.exit_code == 3
    assert caught.value.details == ["already running: another daemon holds the lock"]


def test_only_what_this_start_wrote_is_shown(home: Home) -> None:
    for _ in range(2):
        with pytest.raises(Unreachable) as caught:
            start(home, GIVES_WAY)
    assert len(caught.value.details) == 1
    assert output(home).count("already running") == 2


def test_one_that_gives_way_to_another_that_is_just_starting_is_no_failure(home: Home) -> None:
    home.path.mkdir(mode=0o700)
    turn = home.path / "turn"
    os.mkfifo(turn)  # the other one goes on when ours, about to give way, writes to it
    late = [sys.executable, "-c", f"open({str(turn)!r}).read(); {SERVES}"]
    with subprocess.Popen(late, env=home.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as other:
        (home.path / "omlxd.lock").write_text(f"pid {other.pid}, version 0.1.0\n")
        start(home, f"open({str(turn)!r}, 'w').close(); {GIVES_WAY}")
        quit_daemon(home)
    assert other.returncode == 0


def test_one_that_gave_way_to_another_that_was_just_ending_is_started_again(served: Home) -> None:
    served.path.mkdir(mode=0o700)
    turn, again = served.path / "turn", served.path / "again"
    os.mkfifo(turn)
    with subprocess.Popen([sys.executable, "-c", f"open({str(turn)!r}).read()"]) as other:
        reaping = threading.Thread(target=other.wait)
        reaping.start()
        (served.path / "omlxd.lock").write_text(f"pid {other.pid}, version 0.1.0\n")
        gives_way_once = f"""
import os, sys, time
if not os.path.exists({str(again)!r}):
    open({str(again)!r}, "w").close()
    open({str(turn)!r}, "w").close()
    while os.path.exists("/proc/{other.pid}"):
        time.sleep(0.01)
    sys.exit(1)
"""
        start(served, gives_way_once + SERVES)
        reaping.join()


def test_a_home_that_cannot_be_made_is_one_line(home: Home) -> None:
    outcome = home.run("models", env={"OMLXD_HOME": "/proc/h"})
    assert outcome.code == 3
    assert len(outcome.errors) == 1
    assert "cannot be started" in outcome.errors[0]
