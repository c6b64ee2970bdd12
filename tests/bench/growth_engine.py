"""What a step costs the engine's thread as the line and the answers grow: in CPU time, and in Python functions called.

Two rows decode all the while. The functions are counted by a profile, so their number is the same on every machine;
the times are the thread's own CPU clock's, without the profile. Publishing what others may see is part of the times;
of the functions a usual step's are taken, because so few steps have a publication among them or not by chance.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from omlxd.engine.engine import Engine
from omlxd.engine.scheduler import SchedulerLimits
from tests.bench.bench_model import engine_on, fresh, small_llama
from tests.bench.figures import Figure, Plan
from tests.engine.counting import start_counting, stop_counting
from tests.engine.running import Running, job

ROWS, TOKENS = 2, 150
FLAT = 1.1  # of the smallest point's cost, at the largest
QUEUES, CONTEXTS = (10, 100, 1000, 5000), (128, 1024, 4096, 16_384)


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    limits = SchedulerLimits(max_batch=ROWS, max_queue=2 * max(QUEUES))
    async with engine_on(small_llama(), limits) as engine:
        await _step(engine)
        lines = [await _beside(engine, waiting, plan) for waiting in QUEUES]
    for figure in series("queue", "requests in the line", QUEUES, lines):
        yield figure
    contexts = CONTEXTS[:-1] if plan.quick else CONTEXTS
    async with engine_on(small_llama(), limits) as engine:
        lengths = [await _at(engine, context, plan) for context in contexts]
    for figure in series("sequence", "tokens before them", contexts, lengths):
        yield figure


Costs = tuple[list[float], list[float]]


def series(name: str, words: str, points: Sequence[int], costs: Sequence[Costs]) -> list[Figure]:
    """Both costs at each point, and whether the last is what the first is."""
    figures = []
    for kind, title, unit, column in (("us", "CPU of a step", "µs", 0), ("calls", "functions called in a step", "", 1)):
        for point, cost in zip(points, costs, strict=True):
            samples = cost[column]
            figures.append(
                Figure(f"growth.{name}_{kind}@{point}", f"{title}, by {words}", unit, "lower", samples, x=point)
            )
        ends = f"{title}, {points[-1]} {words}"
        first, last = costs[0][column], costs[-1][column]
        figures.append(Figure(f"growth.{name}_{kind}", ends, unit, "lower", last, f"{points[0]}", first, target=FLAT))
    return figures


async def _beside(engine: Engine, waiting: int, plan: Plan) -> Costs:
    times, calls = [], []
    for _ in range(plan.repeats(3)):
        line = [Running(engine, job(fresh(16), 1, use_cache=False, batch_priority=True)) for _ in range(waiting)]
        times.append(await _step(engine))
        calls.append(await _calls(engine))
        for each in line:
            each.stream.cancel()
        for each in line:
            await each.stream.wait_ended()
    return times, calls


async def _at(engine: Engine, context: int, plan: Plan) -> Costs:
    times = [await _step(engine, context) for _ in range(plan.repeats(3))]
    return times, [await _calls(engine, context)]


async def _rows(engine: Engine, context: int) -> list[Running]:
    """Rows that have their first token: until their last, they are all that the engine computes."""
    rows = [Running(engine, job(fresh(context), TOKENS, stream=True, use_cache=False)) for _ in range(ROWS)]
    for row in rows:
        await row.first_token()
    return rows


async def _step(engine: Engine, context: int = 16) -> float:
    rows = await _rows(engine, context)
    began = await engine.ask_cache(_thread_time)
    for row in rows:
        await row.result()
    return (await engine.ask_cache(_thread_time) - began) / TOKENS * 1e6


async def _calls(engine: Engine, context: int = 16) -> float:
    rows = await _rows(engine, context)
    counter = await start_counting(engine)
    for row in rows:
        await row.result()
    await stop_counting(engine)
    return counter.usual


def _thread_time(_: object) -> float:
    return time.thread_time()
