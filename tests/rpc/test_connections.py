"""Connections: many at once, half closed, gone, in the way, and at the daemon's end."""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import pytest

from omlxd.engine.api import Delta
from omlxd.rpc.connection import RpcLimits
from omlxd.rpc.server import Server
from tests.fakes import FakeBackend, result_of
from tests.rpc.peers import Peer, bound, serving, until
from tests.rpc.test_cancel import PROMPT, Endless

pytestmark = pytest.mark.anyio


async def test_a_fast_request_overtakes_a_slow_one(path: Path) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(peer.request("generate.complete", **PROMPT), peer.request("tokenize", model="tiny", text="a"))
        assert (await peer.answer())["id"] == 2
        backend.generations[0].finish(result_of("late"))
        assert (await peer.answer())["id"] == 1


async def test_an_id_that_is_still_running_is_refused(path: Path) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer:
        request = peer.request("generate.complete", **PROMPT)
        await peer.send(request, request, {**request, "method": "ping", "params": {}})
        for _ in range(2):
            answer = await peer.answer()
            assert (answer["id"], answer["error"]["code"]) == (1, -32600)
        backend.generations[0].finish(result_of("done"))
        assert (await peer.answer())["result"]["text"] == "done"
        assert len(backend.generations) == 1
        await peer.send({**request, "method": "ping", "params": {}})
        assert (await peer.answer())["result"] == "pong"


async def test_a_number_and_a_string_are_different_ids(path: Path) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer:
        request = peer.request("generate.complete", **PROMPT)
        await peer.send(request, {**request, "id": "1"})
        await until(lambda: len(backend.generations) == 2)


async def test_too_many_requests_at_once_are_refused_and_can_still_be_cancelled(path: Path) -> None:
    backend = Endless()
    async with serving(backend, path, RpcLimits(max_in_flight=2)) as running, running.peer() as peer:
        await peer.send(*(peer.request("generate.complete", **PROMPT) for _ in range(3)))
        answer = await peer.answer()
        assert (answer["id"], answer["error"]["code"]) == (3, -32013)
        assert answer["error"]["data"]["depth"] == 2
        assert answer["error"]["data"]["retry_after_ms"] > 0
        await peer.send(peer.request("cancel", id=1))
        assert {(await peer.answer())["id"], (await peer.answer())["id"]} == {1, 4}
        await peer.send(peer.request("generate.complete", **PROMPT))
        await until(lambda: len(backend.generations) == 3)


async def test_short_requests_are_not_counted(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path, RpcLimits(max_in_flight=1)) as running, running.peer() as peer:
        await peer.send(*(peer.request("ping") for _ in range(500)))
        assert [(await peer.answer())["id"] for _ in range(500)] == list(range(1, 501))


@pytest.mark.parametrize("newline", [b"\n", b""])
async def test_a_half_closed_connection_still_gets_its_answers(path: Path, newline: bytes) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(peer.request("generate.complete", **PROMPT))
        await peer.stream.send(b'{"jsonrpc":"2.0","id":"last","method":"ping"}' + newline)
        await peer.stream.send_eof()
        assert (await peer.answer())["id"] == "last"
        backend.generations[0].finish(result_of("done"))
        assert (await peer.answer())["result"]["text"] == "done"
        assert await peer.at_end()


@pytest.mark.parametrize("half_first", [False, True])
async def test_a_closed_connection_cancels_its_requests(path: Path, half_first: bool) -> None:
    backend = Endless()
    backend.load_gate = anyio.Event()
    async with serving(backend, path) as running, running.peer() as other:
        async with running.peer() as peer:
            await peer.send(peer.request("generate.complete", **PROMPT), peer.request("models.load", model="tiny"))
            await until(lambda: backend.generations and backend.loads)
            if half_first:
                await peer.stream.send_eof()
                assert await other.result("ping") == "pong"
        await until(lambda: backend.generations[0].is_cancelled and backend.given_up == 1)
        assert await other.result("ping") == "pong"


async def test_a_peer_that_closes_while_it_is_written_to_is_cancelled(path: Path) -> None:
    backend = Endless()
    async with serving(backend, path) as running:
        async with running.peer() as peer:
            await peer.send(peer.request("generate.complete", **PROMPT, stream=True))
            await until(lambda: backend.generations)
            for _ in range(100):
                backend.generations[0].push(Delta("x" * 100_000))
                await anyio.lowlevel.checkpoint()
        await until(lambda: backend.generations[0].is_cancelled)
        async with running.peer() as other:
            assert await other.result("ping") == "pong"


async def test_a_client_that_sends_and_never_reads_is_no_longer_read(path: Path) -> None:
    """What is held for it stays bounded: its calls in flight, and what its socket takes."""
    async with serving(FakeBackend(), path) as running, running.peer() as silent, running.peer() as other:
        frames = b"".join(b'{"jsonrpc":"2.0","id":%d,"method":"ping"}\n' % number for number in range(200_000))
        sent, refused_in_a_row = 0, 0
        while refused_in_a_row < 20:
            try:
                sent += silent.socket.send(frames[sent : sent + 4000])
                refused_in_a_row = 0
            except BlockingIOError:
                refused_in_a_row += 1
            assert sent < len(frames), "all of it was read, though no answer was taken"
            assert await other.result("ping") == "pong"


async def test_exit_closes_that_connection_only(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as other:
        async with running.peer(headers=True) as peer:
            info = await peer.result("initialize", processId=1, capabilities={}, rootUri=None)
            assert info == {"capabilities": {}, "serverInfo": {"name": "omlxd", "version": "0.1.0"}}
            await peer.send({"jsonrpc": "2.0", "method": "initialized", "params": {}})
            await peer.send(peer.request("shutdown"), {"jsonrpc": "2.0", "method": "exit"})
            assert (await peer.answer())["result"] is None
            assert await peer.at_end()
        assert await other.result("ping") == "pong"
        assert backend.shutdowns == []


async def test_exit_answers_what_was_running_as_cancelled(path: Path) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(peer.request("generate.complete", **PROMPT), {"jsonrpc": "2.0", "method": "exit"})
        assert (await peer.answer())["error"]["code"] == -32800
        assert await peer.at_end()


async def test_shutdown_without_a_greeting_is_no_method(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        error = await peer.error("shutdown")
        assert error["code"] == -32601
        assert "daemon.shutdown" in error["message"]


async def test_drain_refuses_new_clients_and_waits_for_the_answers(path: Path) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(peer.request("generate.complete", **PROMPT))
        await until(lambda: backend.generations)
        drained = anyio.Event()

        async def drain() -> None:
            await running.server.drain()
            drained.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain)
            assert await peer.result("ping") == "pong"
            assert not drained.is_set()
            with pytest.raises(OSError):
                await anyio.connect_unix(path)
            backend.generations[0].finish(result_of("done"))
            assert (await peer.answer())["result"]["text"] == "done"
        assert drained.is_set()
        assert path.exists(), "the path is the daemon's"


async def test_the_end_of_serving_closes_connections_and_cancels_requests(path: Path) -> None:
    backend = Endless()
    backend.load_gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Server(backend).serve, bound(path))
        async with await anyio.connect_unix(path) as stream, await anyio.connect_unix(path) as idle:
            peer, stuck = Peer(stream), Peer(idle)
            await peer.send(peer.request("models.load", model="tiny"), peer.request("generate.complete", **PROMPT))
            await stuck.send(stuck.request("generate.complete", **PROMPT, stream=True))
            await until(lambda: len(backend.generations) == 2 and backend.loads)
            for generation in backend.generations:
                generation.push(Delta("x" * 5_000_000))  # the writer is stuck: nobody reads
            await stuck.read_some()
            tasks.cancel_scope.cancel()
    assert backend.given_up == 1
    assert all(generation.is_cancelled for generation in backend.generations)
    assert path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can call as somebody else")
async def test_another_user_is_turned_away_before_a_byte_is_read(
    backend: FakeBackend, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        path.chmod(0o666)
        path.parent.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as stranger:
            os.seteuid(65534)
            try:
                stranger.connect(str(path))
            finally:
                os.seteuid(0)
            stranger.setblocking(False)
            assert await is_closed(stranger)
        assert "user 65534" in caplog.text
        assert await peer.result("ping") == "pong"


@contextmanager
def few_files(count: int) -> Iterator[None]:
    """Room for `count` more open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


PING = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'


@pytest.mark.parametrize("frame", [PING + b"\n", b"Content-Length: %d\r\n\r\n%b" % (len(PING), PING)])
async def test_without_files_clients_are_told_so_until_some_leave(
    backend: FakeBackend, path: Path, caplog: pytest.LogCaptureFixture, frame: bytes
) -> None:
    caplog.set_level(logging.ERROR)
    async with serving(backend, path) as running, running.peer() as first:
        assert await first.result("ping") == "pong"
        with ExitStack() as clients:
            waiting = [clients.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(8)]
            clients.enter_context(few_files(3))
            for client in waiting:
                client.connect(str(path))
                client.setblocking(False)
                client.send(frame)
            answers = [await first_answer(client) for client in waiting]
            assert all(answer.startswith(b"Content-Length") == frame.startswith(b"C") for answer in answers)
            told = [answer for answer in answers if b"pong" not in answer]
            assert 0 < len(told) < len(waiting)
            error = json.loads(told[0][told[0].index(b"{") :])["error"]
            assert (error["code"], error["data"]["kind"]) == (-32013, "queue_full")
            assert "ulimit -n" in error["message"]
            assert await first.result("ping") == "pong"
        async with running.peer() as late:
            assert await late.result("ping") == "pong"


async def first_answer(client: socket.socket) -> bytes:
    with anyio.fail_after(10):
        await anyio.wait_readable(client)
        return client.recv(1000)


# -- clients that stop halfway ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [b'{"jsonrpc"', b"Content-Le", b"Content-Length: 9\r\n\r\n{", b"C" * 10, b"["])
async def test_who_stops_halfway_is_told_and_hung_up_on(backend: FakeBackend, path: Path, half: bytes) -> None:
    headers = half.startswith(b"C")
    async with (
        serving(backend, path, RpcLimits(stall_s=0.05)) as running,
        running.peer(headers=headers) as peer,
        running.peer() as other,
    ):
        await peer.stream.send(half)
        error = (await peer.answer())["error"]
        assert error["code"] == -32700
        assert "nothing came for 0.05 s" in error["message"]
        assert await peer.at_end()
        assert await other.result("ping") == "pong"


@pytest.mark.parametrize("headers", [False, True])
async def test_between_frames_there_is_no_limit(path: Path, headers: bool) -> None:
    """Also when something runs, or blanks came after the last frame."""
    backend = Endless()
    async with serving(backend, path, RpcLimits(stall_s=0.02)) as running, running.peer(headers=headers) as peer:
        await peer.send(peer.request("generate.complete", **PROMPT))
        await peer.stream.send(b" \r\n ")
        await until(lambda: backend.generations)
        with anyio.move_on_after(0.2):  # ten times the limit
            await peer.read()
        backend.generations[0].finish(result_of("done"))
        assert (await peer.answer())["result"]["text"] == "done"
        assert await peer.result("ping") == "pong"


async def test_who_stops_halfway_loses_nothing_that_was_asked_before(path: Path) -> None:
    backend = Endless()
    async with serving(backend, path, RpcLimits(stall_s=0.05)) as running, running.peer() as peer:
        await peer.send(peer.request("generate.complete", **PROMPT))
        await peer.stream.send(b'{"half')
        assert (await peer.answer())["error"]["code"] == -32700
        backend.generations[0].finish(result_of("done"))
        assert (await peer.answer())["result"]["text"] == "done"
        assert await peer.at_end()


async def is_closed(client: socket.socket) -> bool:
    """Whether the server hangs up on `client` before it answers its ping."""
    with anyio.fail_after(10):
        try:
            client.send(b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n')
            await anyio.wait_readable(client)
            return not client.recv(1000)
        except (BrokenPipeError, ConnectionResetError):
            return True
