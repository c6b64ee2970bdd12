"""What `cache.*` does: numbers, explanations and clearing, of the caches of loaded and of unloaded models.

Lives on the event loop. Counting and clearing walk through everything stored and free arrays, so they run on a worker
thread; an explanation is made on the model's engine thread, between two steps. Knows no arrays.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from omlxd.cache.errors import CacheError
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
    StorageFailed,
)
from omlxd.engine.disk_cache import DiskCache, Verified
from omlxd.engine.pool import Pool
from omlxd.engine.slot import EngineHandle

if TYPE_CHECKING:
    from omlxd.cache.explain import Explanation, Reason
    from omlxd.cache.hot import TierStats
    from omlxd.cache.keys import MediaSpan
    from omlxd.cache.prefix import CacheStats
    from omlxd.cache.ssd_index import Totals

T = TypeVar("T")

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
        """Drops what is in memory for one model, or for all; returns the bytes."""
        ...

    @property
    def disk(self) -> DiskCache: ...


class Caches:
    """The prefix caches as clients see them."""

    def __init__(self, shelf: CacheShelf, pool: Pool, events: EventHub) -> None:
        self._shelf = shelf
        self._pool = pool
        self._events = events

    @property
    def hot_bytes(self) -> int:
        return self._shelf.tier_stats().used_bytes

    @property
    def ssd_bytes(self) -> int:
        disk = self._shelf.disk.stats()
        return 0 if disk is None else disk.used_bytes

    def summary(self) -> Mapping[str, Json]:
        """For `daemon.status`, in no time."""
        tier = self._shelf.tier_stats()
        counters = [metrics.counters for metrics in self._pool.metrics().values()]
        return {
            "enabled": self._shelf.caches_prompts,
            "bytes": {"hot": tier.used_bytes, "ssd": self.ssd_bytes},
            "max_bytes": {"hot": tier.budget_bytes, "ssd": self._shelf.disk.max_bytes},
            "pinned_bytes": tier.pinned_bytes,
            "entries": tier.entries,
            "evictions": tier.evicted,
            "prompt_tokens": sum(each["prompt_tokens"] for each in counters),
            "cached_tokens": sum(each["cached_tokens"] for each in counters),
            "ssd": self._ssd(),
        }

    def _ssd(self) -> Mapping[str, Json]:
        """How the tier on disk is: `degraded` and why, when it cannot take what it should."""
        disk, stats = self._shelf.disk, self._shelf.disk.stats()
        if stats is None:
            state = "closed" if disk.is_enabled else "off"
            return {"state": state, "degraded": False, "reason": None, "queued_bytes": 0, "counts": {}}
        return {
            "state": stats.state,
            "degraded": stats.reason is not None,
            "reason": stats.reason,
            "queued_bytes": stats.queued_bytes,
            "counts": dict(stats.counts),
        }

    async def stats(self, model: str | None) -> Sequence[CacheLine]:
        """Raises ModelNotFound for a model that is not in the catalog."""
        name = await self._name(model)
        return await asyncio.to_thread(self._lines, name)

    def _lines(self, name: str | None) -> Sequence[CacheLine]:
        in_memory, disk = self._shelf.cache_stats(), self._shelf.disk
        on_disk = disk.totals() if disk.stats() is not None else {}
        names = sorted({*in_memory, *(each for each in on_disk if each)})
        return [
            _line(each, in_memory.get(each), on_disk.get(each), disk.failures_of(each))
            for each in names
            if name in (None, each)
        ]

    async def clear(self, model: str | None, tier: CacheTier) -> int:
        """Raises ModelNotFound. Live requests go on: what they have restored is their own."""
        name = await self._name(model)
        freed = await asyncio.to_thread(self._clear, name, tier)
        self._events.publish("cache", what="cleared", model=name, tier=tier, freed_bytes=freed)
        return freed

    def _clear(self, name: str | None, tier: CacheTier) -> int:
        disk, freed = self._shelf.disk, 0
        if tier == "hot":
            _storage(disk, disk.settle)  # what is not on disk yet is written first
        if tier != "ssd":
            freed += self._shelf.clear_caches(name)
        if tier != "hot":
            freed += _storage(disk, lambda: disk.clear(name))
        return freed

    async def close(self, within_s: float) -> None:
        """Writes what waits for the disk, for at most so long. No engine runs any more."""
        await asyncio.to_thread(self._shelf.disk.close, within_s)

    async def verify(self, model: str | None) -> Verified:
        """Reads every file on disk. Raises ModelNotFound, StorageFailed."""
        name, disk = await self._name(model), self._shelf.disk
        return await asyncio.to_thread(_storage, disk, lambda: disk.verify(name))

    async def _name(self, model: str | None) -> str | None:
        return None if model is None else (await self._pool.entry(model)).name


async def explain(engine: EngineHandle, prompt: Prompt) -> CacheExplanation:
    """Why the engine would reuse no more of a prompt. Raises what the prompt raises."""
    ids, media = await _read(engine, prompt)
    if engine.uncached is not None:
        return CacheExplanation(len(ids), 0, "disabled")
    standing, found = await engine.ask_cache(lambda cache: (cache.standing(ids, media), cache.explain(ids, media)))
    is_bad = False
    if engine.store is not None and found.usable_tokens < standing.limit:
        plan = await asyncio.wrap_future(engine.store.plan(standing))
        found = engine.store.explained(plan, found, ids)
        is_bad = engine.store.ends_in_bad_file(standing, found.usable_tokens)
    return CacheExplanation(
        prompt_tokens=len(ids),
        matched_tokens=found.usable_tokens,
        reason="bad_block" if is_bad else _REASONS[found.reason],
        differs_at=await _difference(engine, found),
    )


async def _read(engine: EngineHandle, prompt: Prompt) -> tuple[Sequence[int], Sequence[MediaSpan]]:
    """A prompt as a request would have it, without what its pictures weigh."""
    prepared = await engine.prepare(GenerateRequest(engine.facts.name, prompt))
    return prepared.token_ids, [picture.span for picture in prepared.pictures]


def _storage(disk: DiskCache, work: Callable[[], T]) -> T:
    """`work`'s result; what the disk refuses becomes the client's error."""
    try:
        return work()
    except (CacheError, OSError, sqlite3.Error) as error:
        raise StorageFailed(str(disk.directory), str(error)) from error


def _line(model: str, hot: CacheStats | None, ssd: Totals | None, failures: tuple[int, int]) -> CacheLine:
    dropped, bad = failures
    return CacheLine(
        model=model,
        hits=hot.hits if hot else 0,
        misses=hot.lookups - hot.hits if hot else 0,
        tokens_matched=hot.reused_tokens if hot else 0,
        tokens_computed=hot.computed_tokens if hot else 0,
        blocks=PerTier(hot=hot.blocks if hot else 0, ssd=ssd.blocks if ssd else 0),
        # The same ones are in both tiers, but for what one of them has dropped.
        checkpoints=max(hot.checkpoints if hot else 0, ssd.checkpoints if ssd else 0),
        bytes=PerTier(hot=hot.nbytes if hot else 0, ssd=ssd.nbytes if ssd else 0),
        evictions=hot.evicted if hot else 0,
        writes_dropped=dropped,
        bad_blocks=bad,
    )


async def _difference(engine: EngineHandle, found: Explanation) -> Difference | None:
    if found.reason in ("complete", "nothing_stored"):
        return None
    if found.asked and found.asked[:1] == found.stored[:1]:  # as tokens, pictures are all alike
        return Difference(found.stored_tokens, "another picture", "the prompt's picture")
    stored = await engine.text([*found.before, *found.stored])
    asked = await engine.text([*found.before, *found.asked])
    return Difference(found.stored_tokens, stored, asked)
