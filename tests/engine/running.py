"""Runs a real engine on a tiny model inside a test: submit jobs, gather answers, compare them with the cold run."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.tokenizer_utils
import numpy as np

from omlxd.cache.hot import HotTier
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from omlxd.engine.api import Delta, GenerationResult, Progress
from omlxd.engine.engine import Engine
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.inbox import Close
from omlxd.engine.job import Job
from omlxd.engine.model import LoadedModel, ModelFacts
from omlxd.engine.prefill import new_caches
from omlxd.engine.request import Clock
from omlxd.engine.sampling_settings import SamplingSettings
from omlxd.engine.scheduler import SchedulerLimits
from omlxd.engine.stream import EventStream
from tests.models import VOCABULARY, build, cold_run, write

_ids = itertools.count()


@cache
def tokenizer() -> Any:
    """The tiny models' byte tokenizer, loaded as mlx-lm loads it."""
    return mlx_lm.tokenizer_utils.load(write("llama", Path(tempfile.mkdtemp()) / "tokenizer-only"))


def loaded(name: str, model: Any | None = None, *, eos: frozenset[int] = frozenset()) -> LoadedModel:
    """A tiny model as the loader would hand it over; without EOS unless asked, so that lengths are the test's."""
    facts = ModelFacts(
        name=name,
        path=Path("/nowhere"),
        context_tokens=512,
        vocab_size=VOCABULARY,
        eos_token_ids=eos,
        has_chat_template=True,
        weight_bytes=0,
    )
    return LoadedModel(build(name) if model is None else model, tokenizer(), facts)


def cached(name: str, model: Any | None = None, *, block_size: int = 16, hot_bytes: int = 1 << 30) -> LoadedModel:
    """`loaded`, with a prefix cache of its own."""
    plain = loaded(name, model)
    layout = ModelLayout(new_caches(plain.model))
    cache = PrefixCache(root=name.encode(), layout=layout, tier=HotTier(hot_bytes), block_size=block_size)
    return replace(plain, cache=cache)


def job(prompt: Sequence[int], max_tokens: int = 8, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "id": f"r{next(_ids)}",
        "model": "tiny",
        "prompt": list(prompt),
        "sampling": SamplingSettings(seed=0),
        "logit_bias": {},
        "max_tokens": max_tokens,
        "stop": (),
        "stop_ids": frozenset(),
        "logprobs": 0,
        "stream": False,
        "progress": False,
        "batch_priority": False,
        "use_cache": True,
        "arrived": time.monotonic(),
    }
    return Job(**{**fields, **changes})


@dataclass
class Running:
    """A job under way."""

    engine: Engine
    job: Job
    stream: EventStream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = EventStream(lambda reason: self.engine.abort(self.job.id, reason))
        self.engine.submit(self.job, self.stream)

    async def result(self) -> GenerationResult:
        return await asyncio.wait_for(self.stream.result(), 60)

    async def events(self) -> list[Delta | Progress]:
        return [event async for event in self.stream]

    async def first_token(self) -> None:
        async for event in self.stream:
            if isinstance(event, Delta):
                return


@asynccontextmanager
async def engine(
    model: LoadedModel, *, clock: Clock = time.monotonic, guard: MemoryGuard | None = None, **limits: Any
) -> AsyncIterator[Engine]:
    running = Engine(model, SchedulerLimits(**limits), clock, guard)
    try:
        yield running
    finally:
        running.close(Close("unloaded"))
        await asyncio.wait_for(running.closed, 30)


def assert_is_the_cold_run(model: Any, result: GenerationResult) -> None:
    """Ids equal the cold single run's; log-probabilities of the twenty best tokens agree within 1e-3 at each step."""
    ids, logprobs = cold_run(model, result.prompt_token_ids, len(result.token_ids))
    cold = np.array(logprobs.astype(mx.float32))
    assert list(result.token_ids) == ids
    for step, entry in enumerate(result.logprobs or ()):
        seen = [entry, *entry.top]
        got = np.array([token.logprob for token in seen])
        assert np.abs(got - cold[step, [token.token_id for token in seen]]).max() <= 1e-3, f"step {step}"
