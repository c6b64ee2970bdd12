"""What the measures share: the llama they run, prompts nobody has seen, an engine on it, and the bare loop beside it.

Used inside a measure's process, on its event loop; the bare loop runs in a worker thread, as mlx-lm's users run it.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator

from omlxd.cache.hot import HotTier
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from omlxd.engine.engine import Engine
from omlxd.engine.inbox import Close
from omlxd.engine.model import LoadedModel, ModelFacts
from omlxd.engine.prefill import new_caches
from omlxd.engine.scheduler import SchedulerLimits
from tests.engine.running import Running, job, tokenizer
from tests.models import VOCABULARY, build

CONTEXT = 40_960
SIZE: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 768}


@cache
def llama() -> Module:
    """Large enough that a step is arithmetic, small enough for a CPU."""
    made: Module = build("llama", context=CONTEXT, **SIZE)
    return made


@cache
def small_llama() -> Module:
    """Two layers of width 64: where what is measured is what stands around the model."""
    made: Module = build("llama", context=CONTEXT)
    return made


def fresh(count: int) -> list[int]:
    """A prompt that shares its first tokens with no other."""
    return [random.randrange(256) for _ in range(count)]


@asynccontextmanager
async def engine_on(model: Module, limits: SchedulerLimits | None = None) -> AsyncIterator[Engine]:
    """An engine with a prefix cache in memory."""
    layout = ModelLayout(new_caches(model))
    prefixes = PrefixCache(root=random.randbytes(8), layout=layout, tier=HotTier(4 << 30), block_size=256)
    facts = ModelFacts("bench", Path("/"), None, VOCABULARY, frozenset(), True, 0)
    engine = Engine(LoadedModel(model, tokenizer(), facts, prefixes), limits or SchedulerLimits())
    try:
        await ttft_ms(engine, fresh(600))  # the first turns measure the rate
        yield engine
    finally:
        engine.close(Close("shutdown"))
        await engine.closed


async def ttft_ms(engine: Engine, prompt: Sequence[int], **changes: object) -> float:
    return (await Running(engine, job(prompt, 1, **changes)).result()).timings.ttft_ms


async def decode(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, *, stream: bool) -> float:
    """Tokens per second of all rows together, each from its first token to its last.

    The engine finds all of them in its inbox at once, as the bare loop does: no row waits for another's prompt.
    """
    submitted = threading.Event()
    held = asyncio.ensure_future(engine.ask_cache(lambda _: submitted.wait()))
    await asyncio.sleep(0.01)
    running = [Running(engine, job(prompt, tokens, stream=stream, use_cache=False)) for prompt in prompts]
    submitted.set()
    await held
    readers = [asyncio.ensure_future(each.events()) for each in running] if stream else []
    results = [await each.result() for each in running]
    await asyncio.gather(*readers)
    return sum((tokens - 1) / (result.timings.decode_ms / 1e3) for result in results)


def bare_decode(
    model: Module, prompts: Sequence[list[int]], tokens: int, tell: Callable[[object], object] | None = None
) -> float:
    """The same of mlx-lm's `BatchGenerator` in a loop; `tell` is given each step's tokens."""
    generator = BatchGenerator(model, max_tokens=tokens)
    generator.insert(list(prompts))
    began, produced = 0.0, 0
    while responses := generator.next_generated():
        if not began:
            began = time.perf_counter()
        produced += len(responses)
        if tell is not None:
            tell(responses)
    generator.close()
    return (produced - len(prompts)) / (time.perf_counter() - began)


def bare_ttft_ms(model: Module, prompt: list[int]) -> float:
    """The same loop's time to its first token."""
    generator = BatchGenerator(model, max_tokens=1)
    began = time.perf_counter()
    generator.insert([prompt])
    while not generator.next_generated():
        pass
    generator.close()
    return (time.perf_counter() - began) * 1e3


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
