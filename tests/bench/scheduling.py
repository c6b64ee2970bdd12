"""What clients wait for, on a tiny llama (hidden 256, 8 layers): DESIGN.md section 8's figures of time, in one run.

    .venv/bin/python -m tests.bench.scheduling [--repeats 5]

On Linux, OpenBLAS makes prefill some fifteen times faster and the figures more like a GPU's (PLATFORM.md 2.4):
    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3 .venv/bin/python -m tests.bench.scheduling
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from mlx_lm.generate import BatchGenerator

from omlxd.cache.hot import HotTier
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from omlxd.engine.api import Delta
from omlxd.engine.engine import Engine
from omlxd.engine.inbox import Close
from omlxd.engine.model import LoadedModel, ModelFacts
from omlxd.engine.prefill import new_caches
from omlxd.engine.scheduler import SchedulerLimits
from tests.bench.engine_overhead import model
from tests.engine.running import Running, job, tokenizer
from tests.models import VOCABULARY

LIMITS = SchedulerLimits()
LLAMA = model()


def tokens(count: int) -> list[int]:
    return [random.randrange(256) for _ in range(count)]


def start() -> Engine:
    layout = ModelLayout(new_caches(LLAMA))
    cache = PrefixCache(root=random.randbytes(8), layout=layout, tier=HotTier(4 << 30), block_size=256)
    facts = ModelFacts("bench", Path("/"), None, VOCABULARY, frozenset(), True, 0)
    return Engine(LoadedModel(LLAMA, tokenizer(), facts, cache), LIMITS)


async def ttft_ms(engine: Engine, prompt: Sequence[int], **changes: object) -> float:
    return (await Running(engine, job(prompt, 1, **changes)).result()).timings.ttft_ms


def bare_ttft_ms(prompt: list[int]) -> float:
    generator = BatchGenerator(LLAMA, max_tokens=1)
    began = time.perf_counter()
    generator.insert([prompt])
    while not generator.next_generated():
        pass
    generator.close()
    return (time.perf_counter() - began) * 1e3


async def gaps_ms(stream: Running) -> list[float]:
    """Milliseconds between one token's arrival on the loop and the next's."""
    arrivals = []
    async for event in stream.stream:
        if isinstance(event, Delta):
            arrivals.append(time.perf_counter())
    return [(b - a) * 1e3 for a, b in itertools.pairwise(arrivals)]


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


async def warm_and_short(engine: Engine) -> dict[str, float]:
    shared = tokens(2000)
    cold = await ttft_ms(engine, [*shared, *tokens(8)])
    same = await ttft_ms(engine, [*shared, *tokens(8)])
    short = statistics.median([await ttft_ms(engine, tokens(30)) for _ in range(5)])
    bare = statistics.median([await asyncio.to_thread(bare_ttft_ms, tokens(30)) for _ in range(5)])
    whole = await asyncio.to_thread(bare_ttft_ms, [*shared, *tokens(8)])
    return {"cold_2k_ms": cold, "warm/cold": same / cold, "short/bare": short / bare, "cold/bare": cold / whole}


async def eight_on_one_prefix(engine: Engine) -> dict[str, float]:
    alone = await ttft_ms(engine, [*tokens(2000), *tokens(8)])
    shared = tokens(2000)
    last = max(await asyncio.gather(*(ttft_ms(engine, [*shared, *tokens(8)]) for _ in range(8))))
    return {"8 clients/1": last / alone}


async def beside_a_long_prompt(engine: Engine) -> dict[str, float]:
    quiet = await gaps_ms(Running(engine, job(tokens(16), 300, stream=True)))
    quiet_short = statistics.median([await ttft_ms(engine, tokens(30)) for _ in range(5)])
    stream = Running(engine, job(tokens(16), 4000, stream=True))
    gaps = asyncio.ensure_future(gaps_ms(stream))
    long = Running(engine, job(tokens(8000), 1))
    shorts = []
    while long.stream.outcome != "finished":
        shorts.append(await ttft_ms(engine, tokens(30)))
        await asyncio.sleep(0.05)
    stream.stream.cancel()
    busy = await gaps
    return {
        "quiet_itl_p99_ms": p99(quiet),
        "busy_itl_p99_ms": p99(busy),
        "busy_itl_over_quiet_ms": p99(busy) - p99(quiet),
        "short_over_quiet_ms": max(shorts) - quiet_short,
        "prefill_8k_ms": (await long.result()).timings.prefill_ms,
    }


async def after_a_client_left(engine: Engine) -> dict[str, float]:
    long = Running(engine, job(tokens(8000), 1))
    await asyncio.sleep(0.3)
    long.stream.cancel()
    left = time.perf_counter()
    await asyncio.wait([asyncio.ensure_future(long.stream.wait_ended())])
    return {"work_after_leaving_ms": (time.perf_counter() - left) * 1e3}


async def once() -> dict[str, float]:
    engine = start()
    await ttft_ms(engine, tokens(600))  # the first turns measure the rate
    figures: dict[str, float] = {}
    for part in (warm_and_short, eight_on_one_prefix, beside_a_long_prompt, after_a_client_left):
        figures |= await part(engine)
    engine.close(Close("shutdown"))
    await engine.closed
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    runs = [asyncio.run(once()) for _ in range(parser.parse_args().repeats)]
    for name in runs[0]:
        values = sorted(run[name] for run in runs)
        print(f"{name:26} median {statistics.median(values):9.3f}   {values[0]:9.3f} .. {values[-1]:9.3f}")


if __name__ == "__main__":
    main()
