"""What `cache.*` does: numbers, explanations and clearing, of the caches of loaded and of unloaded models.

Lives on the event loop. Counting and clearing walk through everything stored and free arrays, so they run on a worker
thread; an explanation is made on the model's engine thread, between two steps. Knows no arrays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from omlxd.daemon.events import EventHub
from omlxd.engine.api import (
    CacheExplanation,
    CacheLine,
    CacheReason,
    CacheTier,
    Difference,
    GenerateRequest,
    Json,
    PerTier,
    Prompt,
)
from omlxd.engine.pool import Pool
from omlxd.engine.slot import EngineHandle

if TYPE_CHECKING:
    from omlxd.cache.explain import Explanation, Reason
    from omlxd.cache.hot import TierStats
    from omlxd.cache.prefix import CacheStats

# The cache's reasons in the wire's words. Where a stored sequence merely ends, the prompt is what goes on differently;
# so it is in a picture, of which there is no half. A window's rows that were overwritten are as good as evicted.
_REASONS: Mapping[Reason, CacheReason] = {
    "complete": "full",
    "nothing_stored": "nothing_stored",
    "diverges": "differs",
    "ends": "differs",
    "inside_media": "differs",
    "no_checkpoint": "no_checkpoint",
    "window_gone": "evicted",
}


class CacheShelf(Protocol):
    """Where the caches of all models are; `engine.backend.MlxBackend` is it. For any thread."""

    @property
    def caches_prompts(self) -> bool: ...

    def tier_stats(self) -> TierStats: ...

    def cache_stats(self) -> Mapping[str, CacheStats]:
        """By model, of those that have been loaded. Takes as long as there are blocks."""
        ...

    def clear_caches(self, model: str | None) -> int:
        """Drops what is stored for one model, or for all; returns the bytes."""
        ...


class Caches:
    """The prefix caches as clients see them."""

    def __init__(self, shelf: CacheShelf, pool: Pool, events: EventHub) -> None:
        self._shelf = shelf
        self._pool = pool
        self._events = events

    @property
    def hot_bytes(self) -> int:
        return self._shelf.tier_stats().used_bytes

    def summary(self) -> Mapping[str, Json]:
        """For `daemon.status`, in no time."""
        tier = self._shelf.tier_stats()
        counters = [metrics.counters for metrics in self._pool.metrics().values()]
        return {
            "enabled": self._shelf.caches_prompts,
            "bytes": {"hot": tier.used_bytes, "ssd": 0},
            "max_bytes": {"hot": tier.budget_bytes, "ssd": 0},
            "pinned_bytes": tier.pinned_bytes,
            "entries": tier.entries,
            "evictions": tier.evicted,
            "prompt_tokens": sum(each["prompt_tokens"] for each in counters),
            "cached_tokens": sum(each["cached_tokens"] for each in counters),
        }

    async def stats(self, model: str | None) -> Sequence[CacheLine]:
        """Raises ModelNotFound for a model that is not in the catalog."""
        name = await self._name(model)
        stats = await asyncio.to_thread(self._shelf.cache_stats)
        return [_line(each, stats[each]) for each in sorted(stats) if name in (None, each)]

    async def clear(self, model: str | None, tier: CacheTier) -> int:
        """Raises ModelNotFound. Live requests go on: what they have restored is their own."""
        name = await self._name(model)
        freed = 0 if tier == "ssd" else await asyncio.to_thread(self._shelf.clear_caches, name)
        self._events.publish("cache", what="cleared", model=name, tier=tier, freed_bytes=freed)
        return freed

    async def _name(self, model: str | None) -> str | None:
        return None if model is None else (await self._pool.entry(model)).name


async def explain(engine: EngineHandle, prompt: Prompt) -> CacheExplanation:
    """Why the engine would reuse no more of a prompt. Raises what the prompt raises."""
    ids = (await engine.prepare(GenerateRequest(engine.facts.name, prompt))).token_ids  # as a request's would be
    if engine.uncached is not None:
        return CacheExplanation(len(ids), 0, "disabled")
    found = await engine.ask_cache(lambda cache: cache.explain(ids))
    return CacheExplanation(
        prompt_tokens=len(ids),
        matched_tokens=found.usable_tokens,
        reason=_REASONS[found.reason],
        differs_at=await _difference(engine, found),
    )


def _line(model: str, stats: CacheStats) -> CacheLine:
    return CacheLine(
        model=model,
        hits=stats.hits,
        misses=stats.lookups - stats.hits,
        tokens_matched=stats.reused_tokens,
        tokens_computed=stats.computed_tokens,
        blocks=PerTier(hot=stats.blocks),
        checkpoints=stats.checkpoints,
        bytes=PerTier(hot=stats.nbytes),
        evictions=stats.evicted,
        writes_dropped=0,
        bad_blocks=0,
    )


async def _difference(engine: EngineHandle, found: Explanation) -> Difference | None:
    if found.reason in ("complete", "nothing_stored"):
        return None
    stored = await engine.text([*found.before, *found.stored])
    asked = await engine.text([*found.before, *found.asked])
    return Difference(found.stored_tokens, stored, asked)
