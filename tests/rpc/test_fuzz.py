"""Whatever bytes come, in whatever pieces: no crash, no hang, nothing left over, and the others are served.

Each example is a client of its own beside one that goes on. What the server logs as its own fault fails the test.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omlxd.rpc.connection import RpcLimits
from omlxd.rpc.methods import METHODS
from tests.fakes import FakeBackend
from tests.rpc.peers import Peer, Running, serving

LIMITS: Final = RpcLimits(max_frame_bytes=2000, max_in_flight=4, stall_s=5)
FUZZ: Final = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

JSON_TEXT: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
MEMBERS: Final = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.sampled_from(["2.0", "1.0", 2]),
        "id": st.integers() | st.text(max_size=4) | st.none() | st.lists(st.integers(), max_size=1),
        "method": st.sampled_from(sorted(METHODS)) | st.text(max_size=8) | st.integers(),
        "params": JSON_TEXT
        | st.fixed_dictionaries(
            {},
            optional={
                "model": st.sampled_from(["tiny", "", "x"]),
                "prompt": st.text(max_size=20) | st.lists(st.integers(0, 255), max_size=4),
                "messages": st.just([{"role": "user", "content": "hi"}]) | JSON_TEXT,
                "stream": st.booleans(),
                "id": st.integers(0, 9),
                "token": st.text(max_size=3),
            },
        ),
    },
)
TEXTS: Final = (MEMBERS | st.lists(MEMBERS, max_size=3) | JSON_TEXT).map(lambda value: json.dumps(value).encode())
LINES: Final = TEXTS.map(lambda text: text + b"\n")
HEADED: Final = TEXTS.map(lambda text: b"Content-Length: %d\r\n\r\n%b" % (len(text), text))
NOISE: Final = st.binary(max_size=40) | st.sampled_from(
    [b"\n", b"\r\n\r\n", b"Content-Length: ", b"C", b"{", b"[" * 600, b"\xff\xfe", b"\x00", b'"', b"x" * 3000]
)


@pytest.fixture(autouse=True)
def no_fault(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An internal error is logged with its traceback, and would otherwise pass as an answer."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def torn(stream: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    return [stream[start:stop] for start, stop in pairwise(edges)]


@asynccontextmanager
async def watched(path: Path) -> AsyncIterator[tuple[Running, Peer]]:
    """A server and a client that is served before and after; nothing is left of the others in between."""
    async with serving(FakeBackend(), path, LIMITS) as running, running.peer() as steady:
        assert await steady.result("ping") == "pong"
        tasks, files = len(asyncio.all_tasks()), open_files()
        yield running, steady
        with anyio.fail_after(10):
            while len(asyncio.all_tasks()) > tasks or open_files() > files:
                await anyio.sleep(0.001)
        assert await steady.result("ping") == "pong"


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


async def hear_out(peer: Peer) -> list[Any]:
    """Everything that the server says until it hangs up, each message whole and of JSON-RPC."""
    said = bytearray()
    with anyio.fail_after(10):
        try:
            while True:
                said += await peer.stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return messages(bytes(said))


def messages(said: bytes) -> list[Any]:
    found = []
    while said:
        if said.startswith(b"Content-Length: "):
            head, _, rest = said.partition(b"\r\n\r\n")
            length = int(head.removeprefix(b"Content-Length: "))
            assert len(rest) >= length
            body, said = rest[:length], rest[length:]
        else:
            body, newline, said = said.partition(b"\n")
            assert newline
        found.append(json.loads(body))
    return found


def check(message: Any) -> None:
    for each in message if isinstance(message, list) else [message]:
        assert each["jsonrpc"] == "2.0"
        assert ("method" in each) != ("id" in each)
        if "id" in each:
            assert ("result" in each) != ("error" in each)
            assert each.get("error", {}).get("code") != -32603


def speak(path: Path, stream: bytes, cuts: Sequence[int], *, half_close: bool) -> None:
    async def speak() -> None:
        async with watched(path) as (running, _), running.peer() as peer:
            try:
                for piece in torn(stream, cuts):
                    await peer.stream.send(piece)
                    await anyio.lowlevel.checkpoint()
                if not half_close:
                    return
                await peer.stream.send_eof()
            except anyio.BrokenResourceError:
                pass  # it has hung up: on `exit`, or after a broken header
            for message in await hear_out(peer):
                check(message)

    path.unlink(missing_ok=True)
    anyio.run(speak)


@FUZZ
@given(parts=st.lists(LINES | NOISE, max_size=8), cuts=st.lists(st.integers(0, 500), max_size=8), whole=st.booleans())
def test_lines_and_noise(path: Path, parts: list[bytes], cuts: list[int], whole: bool) -> None:
    speak(path, b"".join(parts), cuts, half_close=whole)


@FUZZ
@given(parts=st.lists(HEADED | NOISE, max_size=8), cuts=st.lists(st.integers(0, 500), max_size=8), whole=st.booleans())
def test_headers_and_noise(path: Path, parts: list[bytes], cuts: list[int], whole: bool) -> None:
    speak(path, b"Content-Length: 2\r\n\r\n{}" + b"".join(parts), cuts, half_close=whole)


@FUZZ
@given(noise=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=4), whole=st.booleans())
def test_noise_alone(path: Path, noise: bytes, cuts: list[int], whole: bool) -> None:
    speak(path, noise, cuts, half_close=whole)


@FUZZ
@given(text=TEXTS, places=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_requests_with_bytes_changed(path: Path, text: bytes, places: list[tuple[int, int]]) -> None:
    changed = bytearray(text)
    for place, byte in places:
        changed[place % len(changed)] = byte
    speak(path, bytes(changed) + b'\n{"jsonrpc":"2.0","id":1,"method":"ping"}\n', [], half_close=True)


def test_many_clients_that_talk_nonsense_leave_nothing_behind(path: Path) -> None:
    """The same seed always; memory is judged after a first round has filled what is kept on purpose."""
    chance = random.Random(8)
    frames = [
        b"{",
        b"[]",
        b'{"jsonrpc":"2.0","id":1,"method":"generate.complete","params":{"model":"tiny","prompt":"a"}}',
    ]

    async def one(running: Running) -> None:
        async with running.peer() as peer:
            for _ in range(chance.randrange(4)):
                await peer.stream.send(chance.choice([*frames, chance.randbytes(50)]) + chance.choice([b"", b"\n"]))

    async def talk() -> int:
        async with watched(path) as (running, steady):
            for _ in range(10):
                async with anyio.create_task_group() as clients:
                    for _ in range(30):
                        clients.start_soon(one, running)
                assert await steady.result("ping") == "pong"
        gc.collect()
        return len(gc.get_objects())

    counts = []
    for _ in range(3):
        path.unlink(missing_ok=True)
        counts.append(anyio.run(talk))
    assert counts[2] - counts[1] < 300, counts  # of 300 clients: less than one object for each
