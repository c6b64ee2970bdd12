"""How long the wire takes: round trips from another process, and what one streamed delta costs the loop.

Run by hand: `.venv/bin/python -m tests.bench.rpc_roundtrip [COUNT]`. The server runs in this process with the fake
backend, the client in a child that knows nothing but sockets; times are the client's, in microseconds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from omlxd.engine.api import Delta, GenerateRequest
from omlxd.rpc.wire import Extras, delta_value, notification, notification_head
from tests.fakes import FakeBackend, FakeGeneration, result_of, serving_in_thread

CLIENT = r"""
import json, socket, sys, time
path, count, lines, body = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode()
peer = socket.socket(socket.AF_UNIX); peer.connect(path)
stream = peer.makefile("rb")
times = []
for _ in range(count):
    start = time.perf_counter()
    peer.sendall(body + b"\n")
    seen = 0
    while b'"result"' not in stream.readline()[:40]:
        seen += 1
    times.append((time.perf_counter() - start) * 1e6)
    assert seen >= lines, seen
times.sort()
print("p50 %.0f us  p99 %.0f us" % (times[len(times) // 2], times[int(len(times) * 0.99)]))
"""
PING = '{"jsonrpc":"2.0","id":1,"method":"ping"}'
CHAT = (
    '{"jsonrpc":"2.0","id":1,"method":"generate.chat","params":{"model":"tiny","max_tokens":8,"stream":%s,'
    '"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"hello"}]}}'
)
DELTAS = 200


def streaming(request: GenerateRequest) -> FakeGeneration:
    generation = FakeGeneration()
    for _ in range(DELTAS if request.stream else 0):
        generation.push(Delta(" word"), merge=False)
    generation.finish(result_of("done"))
    return generation


def client(path: Path, count: int, body: str, lines: int = 0) -> str:
    command = [sys.executable, "-c", CLIENT, str(path), str(count), str(lines), body]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def encode_cost(count: int) -> float:
    head, delta = notification_head(b"17"), Delta(" word")
    start = time.perf_counter()
    for seq in range(count):
        value = delta_value(delta, seq, Extras())
        assert value is not None
        notification(head, value)
    return (time.perf_counter() - start) / count * 1e6


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "s"
        with serving_in_thread(FakeBackend(script=streaming), path):
            print("ping                  ", client(path, count, PING))
            print("generate.chat, whole  ", client(path, count, CHAT % "false"))
            print(f"generate.chat, {DELTAS} deltas", client(path, max(1, count // 50), CHAT % "true", DELTAS))
    print(f"encoding one delta     {encode_cost(100_000):.2f} us")


if __name__ == "__main__":
    main()
