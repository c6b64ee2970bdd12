"""How long until the first token: short, cold, warm, extended, and eight clients on one cold prefix."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

from omlxd.engine.engine import Engine
from tests.bench.bench_model import bare_ttft_ms, engine_on, fresh, llama, ttft_ms
from tests.bench.figures import Figure, Plan

SHARED, TAIL, SHORT = 2048, 8, 30
Samples = dict[str, list[float]]


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    async with engine_on(llama()) as engine:
        samples: Samples = defaultdict(list)
        for _ in range(plan.repeats(9)):
            await _once(engine, samples)
    bare, cold, one = "bare BatchGenerator loop", f"cold, {SHARED} tokens", "one client alone"

    def figure(name: str, title: str, reference: str, of: str, target: float | None) -> Figure:
        return Figure(f"ttft.{name}", title, "ms", "lower", samples[name], reference, samples[of], target=target)

    yield figure("short", f"first token, {SHORT} tokens", bare, "bare_short", 1.15)
    yield figure("cold", f"first token, {SHARED} cold tokens", bare, "bare_cold", 1.15)
    yield figure("same", "first token, the same prompt again", cold, "cold", 0.025)
    yield figure("extended", f"first token, the prompt and {TAIL} tokens more", cold, "cold", 0.025)
    yield figure("other_tail", f"first token, the prefix with another tail of {TAIL}", cold, "cold", 0.025)
    yield figure("eight", f"last first token of 8 clients on one cold prefix of {SHARED}", one, "cold", 1.15)


async def _once(engine: Engine, samples: Samples) -> None:
    shared = fresh(SHARED)
    prompt = [*shared, *fresh(TAIL)]
    samples["bare_cold"].append(await asyncio.to_thread(bare_ttft_ms, llama(), prompt))
    samples["cold"].append(await ttft_ms(engine, prompt))
    samples["same"].append(await ttft_ms(engine, prompt))
    samples["extended"].append(await ttft_ms(engine, [*prompt, *fresh(TAIL)]))
    samples["other_tail"].append(await ttft_ms(engine, [*shared, *fresh(TAIL)]))
    common = fresh(SHARED)
    clients = [ttft_ms(engine, [*common, *fresh(TAIL)]) for _ in range(8)]
    samples["eight"].append(max(await asyncio.gather(*clients)))
    for _ in range(3):
        short = fresh(SHORT)
        samples["bare_short"].append(await asyncio.to_thread(bare_ttft_ms, llama(), short))
        samples["short"].append(await ttft_ms(engine, short))
