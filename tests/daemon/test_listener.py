"""The socket: private from the first moment, and never taken from a living owner."""

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlxd.daemon.listener import SocketInUse, adopt, publish, turn_away
from omlxd.daemon.lock import InstanceLock
from omlxd.daemon.paths import SocketPathTooLong
from omlxd.daemon.private import UnsafePlace, make_private

PUBLISH = """
import sys
from omlxd.daemon.listener import publish
from omlxd.daemon.lock import InstanceLock
from omlxd.daemon.private import make_private
make_private(sys.argv[1])
listener = publish(sys.argv[1] + "/omlxd.sock", InstanceLock(sys.argv[1] + "/omlxd.lock", "1"))
print(flush=True)
input()
"""


@pytest.fixture
def home(tmp_path: Path) -> str:
    make_private(str(tmp_path / "home"))
    return str(tmp_path / "home")


@pytest.fixture
def path(home: str) -> str:
    return f"{home}/omlxd.sock"


@pytest.fixture
def lock(home: str) -> Iterator[InstanceLock]:
    with InstanceLock(f"{home}/omlxd.lock", "1") as held:
        yield held


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path) == 0


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_published_socket_is_listening_private_and_alone(home: str, path: str, lock: InstanceLock):
    with publish(path, lock):
        assert connects(path)
        assert mode(path) == 0o600
        assert sorted(os.listdir(home)) == ["omlxd.lock", "omlxd.sock"]
    assert not os.path.exists(path)


def test_closing_twice_is_closing_once(path: str, lock: InstanceLock):
    listener = publish(path, lock)
    listener.close()
    Path(path).touch()
    listener.close()
    assert os.path.exists(path)


def test_a_socket_left_by_a_crash_is_replaced(path: str, lock: InstanceLock):
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(path)
    with publish(path, lock):
        assert connects(path)


def test_a_killed_process_leaves_a_place_that_can_be_taken(home: str, path: str):
    first = subprocess.Popen([sys.executable, "-c", PUBLISH, home], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None
    first.stdout.readline()
    first.kill()
    first.communicate()
    assert os.path.exists(path)
    with InstanceLock(f"{home}/omlxd.lock", "1") as lock, publish(path, lock):
        assert connects(path)


def test_a_living_socket_is_never_taken_even_if_its_owner_accepts_nobody(path: str, lock: InstanceLock):
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(path)
        owner.listen(0)
        before = os.stat(path).st_ino
        waiting = []
        while not waiting or waiting[-1].connect_ex(path) == 0:  # until the backlog is full
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
        with pytest.raises(SocketInUse, match="belongs to a running program; stop it or set OMLXD_SOCKET"):
            publish(path, lock)
        assert os.stat(path).st_ino == before
        for client in waiting:
            client.close()


def test_a_file_that_is_no_socket_stays(path: str, lock: InstanceLock):
    Path(path).write_text("precious")
    with pytest.raises(UnsafePlace, match="is not a socket"):
        publish(path, lock)
    assert Path(path).read_text() == "precious"


@pytest.mark.parametrize("is_dangling", [True, False])
def test_a_path_or_a_passing_name_that_is_a_link_is_not_followed(
    path: str, home: str, lock: InstanceLock, tmp_path: Path, is_dangling: bool
):
    target = tmp_path / "target"
    if not is_dangling:
        target.write_text("precious")
    os.symlink(target, path)
    with pytest.raises(UnsafePlace, match="is not a socket"):
        publish(path, lock)
    os.unlink(path)
    os.symlink(target, f"{home}/.{os.getpid():x}")
    with publish(path, lock):
        assert connects(path)
    assert target.exists() != is_dangling
    assert is_dangling or target.read_text() == "precious"


def test_a_successors_socket_is_not_removed(path: str, lock: InstanceLock):
    listener = publish(path, lock)
    os.unlink(path)
    with publish(path, lock):
        listener.close()
        assert connects(path)


def test_clients_never_meet_a_half_made_socket(path: str, lock: InstanceLock):
    """A path that is published again and again either refuses a connection or takes it; the file is always private."""
    seen, ended = set(), threading.Event()

    def poll() -> None:
        while not ended.is_set():
            try:
                seen.add(mode(path))
            except FileNotFoundError:
                continue

    poller = threading.Thread(target=poll)
    poller.start()
    for _ in range(30):
        publish(path, lock).close()
    ended.set()
    poller.join()
    assert seen <= {0o600}


@pytest.mark.usefixtures("open_umask")
def test_with_an_open_umask_nothing_is_ever_open_to_others(tmp_path: Path):
    home = tmp_path / "upper" / "home"
    child = subprocess.Popen([sys.executable, "-c", PUBLISH, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    seen = set()
    while not (home / "omlxd.sock").exists():
        assert child.poll() is None
        for place in (home.parent, home, home / "omlxd.sock"):
            try:
                seen.add(mode(place))
            except FileNotFoundError:
                continue
    seen |= {mode(home / "omlxd.sock"), mode(home / "omlxd.lock")}
    child.communicate(b"\n")
    assert seen <= {0o700, 0o600}


def test_a_directory_too_long_for_the_passing_name_is_refused(tmp_path: Path, lock: InstanceLock):
    path = str(tmp_path).ljust(100, "d") + "/s"
    with pytest.raises(SocketPathTooLong, match="the most is 102"):
        publish(path, lock)


def test_a_hidden_socket_keeps_who_has_come_and_is_found_by_nobody_new(home: str, path: str, lock: InstanceLock):
    with publish(path, lock) as listener, socket.socket(socket.AF_UNIX) as early:
        assert not listener.has_visitor()
        early.connect(path)
        listener.hide()
        assert (listener.has_visitor(), connects(path)) == (True, False)
        listener.show()
        assert connects(path)
        listener.hide()
    assert os.listdir(home) == ["omlxd.lock"]


def test_hiding_leaves_a_file_that_somebody_has_put_there(path: str, lock: InstanceLock):
    with publish(path, lock) as listener:
        os.unlink(path)
        Path(path).touch()
        listener.hide()
    assert os.path.isfile(path)


@pytest.fixture
def handed(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        listening.setblocking(False)
        yield listening


def test_a_socket_that_was_handed_over_keeps_its_file_whatever_happens(path: str, handed: socket.socket):
    before = os.stat(path)
    with adopt(handed) as listener:
        assert (listener.path, listener.is_ours) == (path, False)
        listener.hide()
        assert connects(path)
        listener.show()
    assert os.stat(path) == before


def test_who_waits_for_a_daemon_that_cannot_start_is_told_why_and_nobody_is_left_waiting(
    path: str, handed: socket.socket
):
    with socket.socket(socket.AF_UNIX) as waiting, socket.socket(socket.AF_UNIX) as gone, adopt(handed) as listener:
        gone.connect(path)
        gone.close()
        waiting.connect(path)
        turn_away(listener, "the settings are torn")
        answer = json.loads(waiting.makefile().read())
        assert (answer["id"], answer["error"]["message"]) == (None, "omlxd cannot start: the settings are torn")
        assert not listener.has_visitor()
