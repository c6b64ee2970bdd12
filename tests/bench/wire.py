"""What the wire takes: round trips, streamed deltas a second at 1 and 64 clients, and the encoding of one delta.

The server runs in this process with the fake backend, the clients in a child that knows nothing but sockets and keeps
the times. Beside the ping runs a bare asyncio echo, which is what any server in Python pays for a line and its answer.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from anyio.from_thread import start_blocking_portal

from omlxd.engine.api import Delta, GenerateRequest
from omlxd.rpc.wire import Extras, delta_value, notification, notification_head
from tests.bench.figures import Figure, Plan
from tests.fakes import FakeBackend, FakeGeneration, result_of, serving_in_thread

# argv: the socket, clients, rounds, the line to send. Each round, every client sends and reads up to its answer;
# prints the seconds of every round.
CLIENTS = r"""
import json, selectors, socket, sys, time
path, clients, rounds, line = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode() + b"\n"
waiting = selectors.DefaultSelector()
peers = [socket.socket(socket.AF_UNIX) for _ in range(clients)]
for peer in peers:
    peer.connect(path)
    waiting.register(peer, selectors.EVENT_READ)
took = []
for _ in range(rounds):
    left, began = clients, time.perf_counter()
    tails = dict.fromkeys(peers, b"")
    for peer in peers:
        peer.sendall(line)
    while left:
        for key, _ in waiting.select():
            data = tails[key.fileobj] + key.fileobj.recv(1 << 18)
            tails[key.fileobj] = data[data.rfind(b"\n") + 1:]
            left -= data.count(b'"result":')
    took.append(time.perf_counter() - began)
print(json.dumps(took))
"""
PING = '{"jsonrpc":"2.0","id":1,"method":"ping"}'
ECHO = '{"result":"pong"}'
CHAT = (
    '{"jsonrpc":"2.0","id":1,"method":"generate.chat","params":{"model":"tiny","max_tokens":8,"stream":%s,'
    '"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"hello"}]}}'
)
DELTAS = 200


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    count = 500 if plan.quick else 3000
    with tempfile.TemporaryDirectory() as directory, echoing(Path(directory) / "e") as echo:
        served = Path(directory) / "s"
        with serving_in_thread(FakeBackend(script=streaming), served):
            pings, chats, echoes = [], [], []
            for _ in range(plan.repeats(5)):
                echoes.append(_microseconds(clients(echo, 1, count, ECHO)))
                pings.append(_microseconds(clients(served, 1, count, PING)))
                chats.append(_microseconds(clients(served, 1, count // 3, CHAT % "false")))
            reference, words = [each[0] for each in echoes], "bare asyncio echo"
            yield Figure("rpc.ping_p50", "ping, p50", "µs", "lower", [p50 for p50, _ in pings], target=200)
            yield Figure("rpc.ping_p99", "ping, p99", "µs", "lower", [p99 for _, p99 in pings])
            yield Figure("rpc.ping_to_echo", "ping, p50", "µs", "lower", [p50 for p50, _ in pings], words, reference)
            yield Figure("rpc.chat_p50", "a chat answered whole at once, p50", "µs", "lower", [p50 for p50, _ in chats])
            for number in (1, 64):
                rates = []
                for _ in range(plan.repeats(5)):
                    took = clients(served, number, 20 if number == 1 else 2, CHAT % "true")[1:]
                    rates += [number * DELTAS / each for each in took]
                title = f"streamed deltas, {number} client{'s' * (number > 1)}"
                yield Figure(f"rpc.deltas_{number}", title, "deltas/s", "higher", rates)
    yield Figure("rpc.encode", "encoding one delta", "µs", "lower", [encode_us(50_000) for _ in range(5)])


def streaming(request: GenerateRequest) -> FakeGeneration:
    generation = FakeGeneration()
    for _ in range(DELTAS if request.stream else 0):
        generation.push(Delta(" word"), merge=False)
    generation.finish(result_of("done"))
    return generation


def clients(path: Path, count: int, rounds: int, line: str) -> list[float]:
    """Seconds of each round of `count` clients in a process of their own."""
    command = [sys.executable, "-c", CLIENTS, str(path), str(count), str(rounds), line]
    took: list[float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return took


def _microseconds(took: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    took = sorted(took)
    return took[len(took) // 2] * 1e6, took[int(len(took) * 0.99)] * 1e6


def encode_us(count: int) -> float:
    head, delta = notification_head(b"17"), Delta(" word")
    began = time.perf_counter()
    for seq in range(count):
        value = delta_value(delta, seq, Extras())
        assert value is not None
        notification(head, value)
    return (time.perf_counter() - began) / count * 1e6


@contextmanager
def echoing(path: Path) -> Iterator[Path]:
    """A server of nothing but lines that go back as they came, on a loop and thread of its own."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    with start_blocking_portal() as portal:
        server = portal.call(asyncio.start_unix_server, answer, path)
        try:
            yield path
        finally:
            portal.call(server.close)
