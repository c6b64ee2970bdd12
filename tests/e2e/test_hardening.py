"""The real daemon under clients that are many, half there, strangers, or more than it has files for."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from omlxd.rpc.client import RpcError
from tests.e2e.living import Daemon, daemon_in_new_home, rss_bytes, until
from tests.models import write

PING = b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n'
SOME = 64


@pytest.fixture
def living() -> Iterator[Daemon]:
    with daemon_in_new_home() as daemon:
        write("llama", daemon.models / "tiny", eos=[])
        daemon.start()
        yield daemon


@contextmanager
def room_for(files: int) -> Iterator[None]:
    """In this process, which is all the clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < files:
        pytest.skip(f"the hard limit of open files is {hard}, this needs {files}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connected(daemon: Daemon, count: int, clients: ExitStack) -> list[socket.socket]:
    made = [clients.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(count)]
    for client in made:
        client.settimeout(20)
        client.connect(daemon.home.socket)
    return made


def files_of(daemon: Daemon) -> int:
    assert daemon.process is not None
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def answer(client: socket.socket) -> object:
    with client.makefile("rb") as lines:
        return json.loads(lines.readline())


def test_a_thousand_clients_are_served_and_leave_nothing_behind(living: Daemon) -> None:
    """Also when a model is loaded, which makes mlx-lm set a limit of open files of its own."""
    assert living.process is not None
    living.call("generate.complete", model="tiny", prompt="x", max_tokens=1)
    before = files_of(living)
    with room_for(2000), ExitStack() as clients:
        many = connected(living, 1000, clients)
        for client in many:
            client.sendall(PING)
        assert {str(answer(client)) for client in many} == {"{'jsonrpc': '2.0', 'result': 'pong', 'id': 1}"}
        first = rss_bytes(living.process.pid)
    until(lambda: files_of(living) <= before)
    with room_for(2000), ExitStack() as clients:
        for client in connected(living, 1000, clients):
            client.sendall(PING)
            answer(client)
        assert rss_bytes(living.process.pid) < first + 10 * 2**20
    until(lambda: files_of(living) <= before)


def test_clients_that_stop_halfway_hold_nobody_up_and_go_when_they_go(living: Daemon) -> None:
    before = files_of(living)
    with ExitStack() as clients:
        for number, client in enumerate(connected(living, 3 * SOME, clients)):
            client.sendall((b'{"jsonrpc":', b"Content-Length: 99\r\n\r\n{", PING)[number % 3])
            if number % 2:
                client.shutdown(socket.SHUT_WR)
        assert living.call("ping") == "pong"
    until(lambda: files_of(living) <= before)


def test_more_clients_than_files_are_told_so_and_served_when_others_leave() -> None:
    with daemon_in_new_home() as daemon, ExitStack() as clients:
        daemon.start()
        assert daemon.process is not None
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (256, 256))
        told = 0
        for client in connected(daemon, 500, clients):
            with suppress(BrokenPipeError):  # it was told before it said a word
                client.sendall(PING)
            said = answer(client)
            assert isinstance(said, dict)
            told += said.get("error", {}).get("code") == -32013
        assert 244 <= told < 300
        with pytest.raises(RpcError, match="ulimit -n") as caught:
            daemon.call("ping")
        assert caught.value.kind == "queue_full"
        clients.close()
        until(lambda: pings(daemon))
        assert files_of(daemon) < 40


def pings(daemon: Daemon) -> bool:
    try:
        return bool(daemon.call("ping") == "pong")
    except RpcError:
        return False


STRANGER = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
client.settimeout(20)
try:
    client.connect(sys.argv[1])
    client.sendall(b'{"jsonrpc":"2.0","id":1,"method":"daemon.shutdown"}\\n')
    print("heard", client.recv(1000))
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can call as somebody else")
def test_a_stranger_is_kept_out_by_the_directory_and_then_by_the_daemon(living: Daemon) -> None:
    def call() -> str:
        command = [sys.executable, "-S", "-c", STRANGER, living.home.socket]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert call() == "PermissionError"
    for place in (living.home.path.parent, living.home.path):
        place.chmod(0o755)
    Path(living.home.socket).chmod(0o666)
    assert call() in ("heard b''", "ConnectionResetError", "BrokenPipeError")
    assert "refused a client of user 65534" in living.log
    assert living.call("ping") == "pong"
