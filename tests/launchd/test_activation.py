"""Sockets handed over: taken as they are where they can be served on, refused by name where not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from omlxd.launchd.activation import ActivationFailed, Launchd, ListenFds, activated_listeners

PID = 4711


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(tmp_path / "s"))
        listening.listen()
        yield listening


class Handing:
    """Hands over what the test says; the daemon's side closes it, so it is given copies."""

    def __init__(self, *sockets: socket.socket) -> None:
        self.given = [os.dup(one.fileno()) for one in sockets]

    def descriptors(self, name: str) -> Sequence[int]:
        assert name == "rpc"
        return self.given


# -- the checks -------------------------------------------------------------------------------------------------------


def test_a_listening_unix_socket_is_served_on_without_blocking_and_not_inherited(listening: socket.socket) -> None:
    (handed,) = activated_listeners(Handing(listening))
    with handed:
        assert (handed.getblocking(), handed.get_inheritable()) == (False, False)
        assert handed.getsockname() == listening.getsockname()


def test_one_clients_connection_is_refused(listening: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ActivationFailed, match=r"one client's connection.*Accept=no"):
        activated_listeners(Handing(ours))


def test_a_socket_of_another_kind_is_refused() -> None:
    with socket.socket(socket.AF_INET) as network, pytest.raises(ActivationFailed, match="no Unix stream socket"):
        activated_listeners(Handing(network))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as packets, pytest.raises(ActivationFailed, match="stream"):
        activated_listeners(Handing(packets))


def test_what_is_no_socket_is_refused() -> None:
    handing = Handing()
    with open(os.devnull) as file:
        for descriptor in (file.fileno(), 9999):
            handing.given = [descriptor]
            with pytest.raises(ActivationFailed, match=f"descriptor {descriptor} .* is none"):
                activated_listeners(handing)


# -- LISTEN_FDS -------------------------------------------------------------------------------------------------------


def announced(**env: str) -> list[int]:
    return list(ListenFds(env, PID).descriptors("rpc"))


def test_without_an_announcement_or_with_one_for_another_process_nothing_is_handed_over() -> None:
    assert announced() == []
    assert announced(LISTEN_PID="1", LISTEN_FDS="1") == []


def test_descriptors_count_from_three_and_are_found_by_name() -> None:
    assert announced(LISTEN_PID=str(PID), LISTEN_FDS="2") == [3, 4]
    assert announced(LISTEN_PID=str(PID), LISTEN_FDS="3", LISTEN_FDNAMES="a:rpc:b") == [4]


@pytest.mark.parametrize("pid", [PID, 1])
def test_the_announcement_is_gone_afterwards_so_that_no_child_believes_it(pid: int) -> None:
    env = {"LISTEN_PID": str(pid), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "rpc", "PATH": "/bin"}
    ListenFds(env, PID).descriptors("rpc")
    assert env == {"PATH": "/bin"}


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"LISTEN_FDS": "many"}, "LISTEN_FDS is 'many'"),
        ({"LISTEN_FDS": "1", "LISTEN_FDNAMES": "omlxd.socket"}, "FileDescriptorName=rpc"),
        ({"LISTEN_FDS": "2", "LISTEN_FDNAMES": "rpc"}, "call the socket rpc"),
    ],
)
def test_an_announcement_that_does_not_fit_is_refused_with_what_to_write(env: dict[str, str], said: str) -> None:
    with pytest.raises(ActivationFailed, match=said):
        announced(LISTEN_PID=str(PID), **env)


# -- launchd ----------------------------------------------------------------------------------------------------------

ASK = """
import sys
from omlxd.launchd.activation import ActivationFailed, Launchd
launchd = Launchd(sys.argv[1])
for name in sys.argv[2:]:
    try:
        print(*launchd.descriptors(name))
    except ActivationFailed as error:
        print(error)
"""


def asked(library: Path, *names: str, **env: str) -> list[str]:
    """What a process of its own is answered: being activated is once per process."""
    command = [sys.executable, "-c", ASK, str(library), *names]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_launchd_hands_over_what_the_agent_calls_rpc(libsystem: Path) -> None:
    assert asked(libsystem, "rpc", FAKE_LAUNCHD_SOCKETS="rpc=7,8") == ["7 8"]


def test_a_process_that_launchd_did_not_start_and_a_job_without_the_socket_have_none(libsystem: Path) -> None:
    assert asked(libsystem, "rpc") == [""]
    assert asked(libsystem, "rpc", FAKE_LAUNCHD_SOCKETS="other=7") == [""]


def test_asking_twice_is_refused_with_launchds_reason(libsystem: Path) -> None:
    first, second = asked(libsystem, "rpc", "rpc", FAKE_LAUNCHD_SOCKETS="rpc=7")
    assert (first, "Operation already in progress" in second) == ("7", True)


def test_where_the_system_has_no_launchd_nothing_is_handed_over() -> None:
    if sys.platform == "darwin":
        pytest.skip("macOS has it")
    assert list(Launchd().descriptors("rpc")) == []
