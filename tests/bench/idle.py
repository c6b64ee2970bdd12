"""What a daemon uses that does nothing: its resident memory and CPU before a model, with one, and after it has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tests.bench.figures import Figure, Plan
from tests.bench.living import cpu_s, home_with, rss_mb, spawn


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    seconds = 5 if plan.quick else 30
    with home_with("llama") as daemon:
        process, _ = spawn(daemon)
        await asyncio.sleep(2)  # what follows the start is not idleness
        yield Figure("idle.rss", "resident memory before a model", "MB", "lower", [rss_mb(process.pid)], target=60)
        share = [await _cpu_percent(process.pid, seconds) for _ in range(plan.repeats(3))]
        yield Figure("idle.cpu", "CPU before a model", "%", "lower", share, target=0.1)
        daemon.call("generate.complete", model="llama", prompt="x", max_tokens=1, ignore_eos=True)
        await asyncio.sleep(12)  # beyond the enforcer's watch on a daemon that has just worked
        yield Figure("idle.rss_loaded", "resident memory with an idle model", "MB", "lower", [rss_mb(process.pid)])
        share = [await _cpu_percent(process.pid, seconds) for _ in range(plan.repeats(3))]
        yield Figure("idle.cpu_loaded", "CPU with an idle model", "%", "lower", share)
        daemon.call("models.unload", model="llama")
        await asyncio.sleep(2)
        yield Figure("idle.rss_after", "resident memory after it was unloaded", "MB", "lower", [rss_mb(process.pid)])


async def _cpu_percent(pid: int, seconds: float) -> float:
    before = cpu_s(pid)
    await asyncio.sleep(seconds)
    return (cpu_s(pid) - before) / seconds * 100
