"""What the Python of the whole path costs, in microseconds of CPU per token and row, and which part has how much.

A tiny llama and sixteen streaming rows. Threads are asked for their own CPU clocks, so that waiting for the device and
for other processes does not count: the engine's thread (against the bare loop's, which builds the same graphs) and the
event loop's. The parts are the real objects, called in loops.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from omlxd.engine.api import Delta
from omlxd.engine.decoder import direct
from omlxd.engine.engine import Engine
from omlxd.engine.metrics import Meter
from omlxd.engine.request import Request
from omlxd.engine.sampling import BatchSampler, SamplerRow
from omlxd.engine.sampling_settings import SamplingSettings
from omlxd.engine.scheduler import Prompt, SchedulerLimits, View, turn
from omlxd.engine.stream import EventStream
from omlxd.engine.text import Detokenizer
from omlxd.rpc.wire import Extras, delta_value, notification, notification_head
from tests.bench.bench_model import engine_on, fresh, small_llama
from tests.bench.figures import Figure, Plan
from tests.bench.wire import CHAT, DELTAS, clients, streaming
from tests.engine.running import Running, job, tokenizer
from tests.fakes import FakeBackend, serving_in_thread
from tests.models import VOCABULARY

ROWS = 16
ENDLESS = 1 << 40


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    repeats, tokens = plan.repeats(5), 100 if plan.quick else 300
    engine_us, bare_us, loop_us = [], [], []
    async with engine_on(small_llama()) as engine:
        for _ in range(1 + repeats):
            bare_us.append(await asyncio.to_thread(_bare_us, tokens))
            thread, loop = await _engine_us(engine, tokens)
            engine_us.append(thread)
            loop_us.append(loop)
    bare = "the bare loop's thread"
    yield Figure("python.engine", "engine thread, all of it", "µs", "lower", engine_us[1:], bare, bare_us[1:])
    over = [ours - theirs for ours, theirs in zip(engine_us[1:], bare_us[1:], strict=True)]
    yield Figure("python.over_bare", "engine thread, more than the bare loop's", "µs", "lower", over)
    yield Figure("python.loop", "event loop: handing over and reading the events", "µs", "lower", loop_us[1:])
    yield Figure(
        "python.rpc", "event loop: a delta from the stream to the socket", "µs", "lower", _rpc_us(plan.repeats(5))
    )
    for name, (title, part) in PARTS.items():
        count = 2000 if plan.quick else 10_000
        samples = [await asyncio.to_thread(_per_call_us, part, count) for _ in range(repeats)]
        yield Figure(f"python.part.{name}", title, "µs", "lower", samples)


def _bare_us(tokens: int) -> float:
    generator = BatchGenerator(small_llama(), max_tokens=tokens)
    generator.insert([fresh(16) for _ in range(ROWS)])
    generator.next_generated()
    began, steps = time.thread_time(), 0
    while generator.next_generated():
        steps += 1
    took = time.thread_time() - began
    generator.close()
    return took / steps / ROWS * 1e6


async def _engine_us(engine: Engine, tokens: int) -> tuple[float, float]:
    """Per token and row: the engine thread's CPU, and the loop's."""
    rows = [Running(engine, job(fresh(16), tokens, stream=True, use_cache=False)) for _ in range(ROWS)]
    for row in rows:
        await row.first_token()
    began, loop_began = await engine.ask_cache(_thread_time), time.thread_time()
    readers = [asyncio.ensure_future(row.events()) for row in rows]
    for row in rows:
        await row.result()
    await asyncio.gather(*readers)
    took, loop_took = await engine.ask_cache(_thread_time) - began, time.thread_time() - loop_began
    return took / tokens / ROWS * 1e6, loop_took / tokens / ROWS * 1e6


def _thread_time(_: object) -> float:
    return time.thread_time()


def _rpc_us(repeats: int) -> list[float]:
    """CPU of a server's loop thread per delta, its client in another process."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "s"
        with serving_in_thread(FakeBackend(script=streaming), path) as portal:
            samples = []
            for _ in range(repeats):
                began = portal.call(time.thread_time)
                clients(path, 1, 10, CHAT % "true")
                samples.append((portal.call(time.thread_time) - began) / 10 / DELTAS * 1e6)
            return samples


# -- the parts: each takes how many tokens it is to do, and does them --------------------------------------------------


def _scheduling(tokens: int) -> None:
    view = View(decoding=ROWS, waiting=3, prompts=[])
    long = View(decoding=ROWS, waiting=3, prompts=[Prompt("a", 5000, 5000), Prompt("b", 20, 20)])
    limits = SchedulerLimits()
    for _ in range(tokens // ROWS // 2):
        turn(view, limits)
        turn(long, limits)


def _sampling(settings: Callable[[int], SamplingSettings]) -> Callable[[int], None]:
    def draw(tokens: int) -> None:
        sampler = BatchSampler([SamplerRow(settings(row)) for row in range(ROWS)])
        logprobs = mx.zeros((ROWS, VOCABULARY))
        for _ in range(tokens // ROWS):
            sampler(logprobs)

    return draw


def _detokenizing(tokens: int) -> None:
    detokenizer = Detokenizer(direct(tokenizer()))
    for index in range(tokens):
        detokenizer.add(65 + index % 26)


def _accepting(tokens: int) -> None:
    request = Request(job(fresh(16), ENDLESS, stream=True), direct(tokenizer()), time.monotonic)
    for index in range(tokens):
        request.accept(65 + index % 26, None)


def _metering(tokens: int) -> None:
    meter = Meter(time.monotonic)
    request = Request(job(fresh(16), ENDLESS), tokenizer(), time.monotonic)
    for _ in range(tokens // ROWS):
        meter.stepped(ROWS)
        for _ in range(ROWS):
            meter.drew(request)


def _delivering(tokens: int) -> None:
    async def deliver() -> None:
        stream = EventStream(lambda _: None)
        events, delta = aiter(stream), Delta("x", token_ids=[1])
        for _ in range(tokens):
            stream.deliver(delta)
            await anext(events)

    asyncio.run(deliver())


def _encoding(tokens: int) -> None:
    head, delta = notification_head(b"17"), Delta(" word")
    for seq in range(tokens):
        value = delta_value(delta, seq, Extras())
        assert value is not None
        notification(head, value)


def _sending(tokens: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    body = b"x" * 120
    with ours, theirs:
        for _ in range(tokens):
            ours.send(body)
            theirs.recv(1 << 16)


Part = Callable[[int], None]
PARTS: dict[str, tuple[str, Part]] = {
    "turn": ("part: the scheduler's decision", _scheduling),
    "greedy": ("part: sampling, greedy", _sampling(lambda row: SamplingSettings(seed=row))),
    "drawn": (
        "part: sampling with temperature and top_p",
        _sampling(lambda row: SamplingSettings(seed=row, temperature=0.7, top_p=0.9)),
    ),
    "text": ("part: token to text", _detokenizing),
    "accept": ("part: token to events, the text in it", _accepting),
    "meter": ("part: metrics", _metering),
    "stream": ("part: an event into its stream and out", _delivering),
    "encode": ("part: encoding a delta", _encoding),
    "send": ("part: the socket, sent and received", _sending),
}


def _per_call_us(part: Part, tokens: int) -> float:
    part(tokens // 10)
    began = time.thread_time()
    part(tokens)
    return (time.thread_time() - began) / tokens * 1e6
