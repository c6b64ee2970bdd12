"""What a client notices of another: a stream and a short prompt beside 8k cold tokens, and one who leaves midway."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator

from omlxd.engine.api import Delta
from omlxd.engine.engine import Engine
from omlxd.engine.scheduler import SchedulerLimits
from tests.bench.bench_model import engine_on, fresh, llama, percentile, ttft_ms
from tests.bench.figures import Figure, Plan
from tests.engine.running import Running, job

LONG, SHORT = 8000, 30
STALL_MS = SchedulerLimits().max_decode_stall_ms


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    runs = []
    async with engine_on(llama()) as engine:
        for _ in range(plan.repeats(5)):
            runs.append(await _once(engine))
    quiet_p50, quiet_p99, busy_p50, busy_p99, short_quiet, short_busy, leaving = (
        list(column) for column in zip(*runs, strict=True)
    )
    quiet = "quiet"
    beside = f"beside a prefill of {LONG}"
    yield Figure("itl.quiet_p50", "between two tokens, quiet, p50", "ms", "lower", quiet_p50)
    yield Figure("itl.quiet_p99", "between two tokens, quiet, p99", "ms", "lower", quiet_p99)
    yield Figure("itl.busy_p50", f"between two tokens, {beside}, p50", "ms", "lower", busy_p50)
    yield Figure("itl.busy_p99", f"between two tokens, {beside}, p99", "ms", "lower", busy_p99, quiet, quiet_p99)
    over = [busy - calm for busy, calm in zip(busy_p99, quiet_p99, strict=True)]
    yield Figure("itl.busy_over_quiet", f"p99 {beside}, more than quiet", "ms", "lower", over, target=STALL_MS)
    late = [busy - calm for busy, calm in zip(short_busy, short_quiet, strict=True)]
    yield Figure(
        "ttft.short_busy", f"first token of {SHORT} {beside}, more than quiet", "ms", "lower", late, target=4 * STALL_MS
    )
    yield Figure("leaving", "work after a client left mid-prefill", "ms", "lower", leaving, target=250.0)


async def _once(engine: Engine) -> tuple[float, ...]:
    quiet = await _gaps_ms(Running(engine, job(fresh(16), 300, stream=True)))
    short_quiet = statistics.median([await ttft_ms(engine, fresh(SHORT)) for _ in range(5)])
    stream = Running(engine, job(fresh(16), 4000, stream=True))
    gaps = asyncio.ensure_future(_gaps_ms(stream))
    long = Running(engine, job(fresh(LONG), 1))
    shorts = []
    while long.stream.outcome != "finished":
        shorts.append(await ttft_ms(engine, fresh(SHORT)))
        await asyncio.sleep(0.05)
    stream.stream.cancel()
    busy = await gaps
    return (
        percentile(quiet, 0.5),
        percentile(quiet, 0.99),
        percentile(busy, 0.5),
        percentile(busy, 0.99),
        short_quiet,
        max(shorts),
        await _leaving_ms(engine),
    )


async def _gaps_ms(stream: Running) -> list[float]:
    """Milliseconds between one token's arrival on the loop and the next's."""
    arrivals = [time.perf_counter() async for event in stream.stream if isinstance(event, Delta)]
    return [(after - before) * 1e3 for before, after in itertools.pairwise(arrivals)]


async def _leaving_ms(engine: Engine) -> float:
    long = Running(engine, job(fresh(LONG), 1))
    await asyncio.sleep(0.3)
    long.stream.cancel()
    left = time.perf_counter()
    await long.stream.wait_ended()
    return (time.perf_counter() - left) * 1e3
