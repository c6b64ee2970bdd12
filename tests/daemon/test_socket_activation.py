"""The daemon on a socket that systemd holds: started by its first client, and the socket outlives it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omlxd.daemon.lock import InstanceLock
from omlxd.rpc.client import Client, RpcError
from tests.daemon.process import environment

ACTIVATE = shutil.which("systemd-socket-activate")
if ACTIVATE is None:
    pytest.skip(
        "NO systemd-socket-activate: socket activation is not tested; install Debian's package systemd",
        allow_module_level=True,
    )


class Unit:
    """A socket that listens, and the daemon behind it once somebody has come."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        self.process = process
        self.path = path

    def call(self, method: str, **params: object) -> object:
        with Client.connect(str(self.path)) as client:
            return client.call(method, params, timeout_s=30)

    def end(self) -> tuple[int, str]:
        """Waits for the end: the exit code, and what was said on standard error."""
        said = self.process.communicate(timeout=30)[1]
        return self.process.returncode, said


@pytest.fixture
def home() -> Iterator[Path]:
    """Not in tmp_path: the socket is elsewhere than in the home, and both must be short."""
    with tempfile.TemporaryDirectory(prefix="omlxd-") as directory:
        yield Path(directory) / "home"


@contextmanager
def listening(home: Path, *options: str, **variables: str) -> Iterator[Unit]:
    path = home.parent / "unit.sock"
    env = environment(home, **variables)
    passed = [f"-E{name}" for name in env if name.startswith(("OMLXD_", "HF_"))]
    command = [ACTIVATE or "", "-l", str(path), *options, *passed, sys.executable, "-m", "omlxd.daemon", "--quiet"]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "Listening on" in line:
            break
    try:
        yield Unit(process, path)
    finally:
        process.kill()
        process.communicate()


def identity(path: Path) -> tuple[int, int, int]:
    state = os.lstat(path)
    return state.st_ino, state.st_mode, state.st_mtime_ns


def test_the_first_client_starts_the_daemon_and_the_socket_outlives_it(home: Path) -> None:
    with listening(home, "--fdname=rpc", OMLXD_SOCKET=str(home.parent / "unit.sock")) as unit:
        before = identity(unit.path)
        info = unit.call("daemon.info")
        assert isinstance(info, dict)
        assert (info["pid"], info["socket"]) == (unit.process.pid, str(unit.path))  # it has become the daemon
        assert unit.call("daemon.shutdown") is True
        assert unit.end()[0] == 0
        assert identity(unit.path) == before
    assert "unit.sock.lock" not in os.listdir(home.parent)  # a path of the supervisor's needs no lock of ours


def test_clients_that_came_together_are_all_served(home: Path) -> None:
    with listening(home) as unit:
        clients = [Client.connect(str(unit.path)) for _ in range(3)]
        assert [client.call("ping", timeout_s=30) for client in clients] == ["pong"] * 3
        for client in clients:
            client.close()


def test_a_socket_where_nobody_looks_is_said_in_the_log(home: Path) -> None:
    with listening(home) as unit:
        unit.call("ping")
        said = (home / "logs" / "omlxd.log").read_text()
    assert f"listening at {unit.path}, where omlxctl does not look: it looks at {home}/omlxd.sock" in said


def test_idle_it_ends_and_leaves_the_socket_for_the_next_call(home: Path) -> None:
    with listening(home, OMLXD_DAEMON__IDLE_EXIT_S="0.1") as unit:
        before = identity(unit.path)
        unit.call("ping")
        assert unit.end()[0] == 0
        assert identity(unit.path) == before


def test_one_process_per_connection_is_refused(home: Path) -> None:
    with listening(home, "--accept") as unit, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(unit.path))
        assert client.recv(1) == b""
        assert unit.process.stderr is not None
        said = next(line for line in unit.process.stderr if line.startswith("omlxd:"))
    assert "is one client's connection" in said
    assert "Accept=no" in said
    assert not home.exists()


def test_a_socket_of_another_name_is_refused(home: Path) -> None:
    with listening(home, "--fdname=other") as unit, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(unit.path))
        code, said = unit.end()
    assert (code, "FileDescriptorName=rpc" in said) == (78, True)


def test_a_daemon_that_cannot_start_tells_its_first_client_why(home: Path) -> None:
    home.mkdir(mode=0o700)
    (home / "config.toml").write_text("[engine]\nmax_bach = 8\n")
    with listening(home) as unit:
        with pytest.raises(RpcError, match=r"omlxd cannot start: .*engine\.max_bach"):
            unit.call("ping")
        assert unit.end()[0] == 78


def test_while_another_daemon_has_the_home_clients_are_told_who(home: Path) -> None:
    home.mkdir(mode=0o700)
    with InstanceLock(str(home / "omlxd.lock"), "7.0"), listening(home) as unit:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(unit.path))
            answer = json.loads(client.makefile().read())
        assert f"already running: a daemon (pid {os.getpid()}, version 7.0)" in answer["error"]["message"]
        assert unit.end()[0] == 1
