"""What clients are told of the caches: true numbers, why a prompt misses, and what clearing gave back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from omlxd.cache.hot import TierStats
from omlxd.cache.prefix import CacheStats
from omlxd.daemon.caches import Caches, explain
from omlxd.daemon.events import EventHub
from omlxd.engine.api import CacheExplanation, CacheLine, Difference, ModelNotFound, PerTier, TextPrompt, TokenPrompt
from omlxd.engine.disk_cache import DiskCache
from tests.engine.running import Running, cached, engine, job, loaded
from tests.engine.test_pool import FakeBackend, pool, use

STATS = CacheStats(
    lookups=10,
    hits=7,
    lookup_tokens=900,
    reused_tokens=600,
    computed_tokens=280,
    published_blocks=20,
    published_checkpoints=4,
    refused=0,
    evicted=3,
    blocks=17,
    checkpoints=4,
    nbytes=5000,
    pinned_nbytes=0,
)


class Shelf:
    """Has caches of a and b; b is not loaded any more."""

    caches_prompts = True

    def __init__(self) -> None:
        self.cleared: list[str | None] = []
        self.disk = DiskCache(None)  # no tier on disk

    def tier_stats(self) -> TierStats:
        return TierStats(
            budget_bytes=9000,
            pinned_bytes=1000,
            cached_bytes=4000,
            offered_bytes=0,
            entries=21,
            evicted=3,
            evicted_bytes=700,
            refused=0,
        )

    def cache_stats(self) -> Mapping[str, CacheStats]:
        return {"b": STATS, "a": STATS}

    def clear_caches(self, model: str | None) -> int:
        self.cleared.append(model)
        return 5000


def line(model: str) -> CacheLine:
    return CacheLine(
        model=model,
        hits=7,
        misses=3,
        tokens_matched=600,
        tokens_computed=280,
        blocks=PerTier(hot=17),
        checkpoints=4,
        bytes=PerTier(hot=5000),
        evictions=3,
        writes_dropped=0,
        bad_blocks=0,
    )


def test_there_is_a_line_for_every_model_that_has_a_cache_loaded_or_not() -> None:
    async def main() -> None:
        async with pool(FakeBackend()) as models:
            caches = Caches(Shelf(), models, EventHub())
            assert await caches.stats(None) == [line("a"), line("b")]
            assert await caches.stats("org/a") == [line("a")]
            assert await caches.stats("c") == []
            with pytest.raises(ModelNotFound):
                await caches.stats("z")

    asyncio.run(main())


def test_clearing_says_what_came_free_and_is_an_event() -> None:
    shelf = Shelf()

    async def main() -> list[object]:
        async with pool(FakeBackend()) as models:
            events = EventHub()
            told = aiter(events.subscribe(["cache"]))
            caches = Caches(shelf, models, events)
            freed = [
                await caches.clear(None, "all"),
                await caches.clear("org/a", "hot"),
                await caches.clear(None, "ssd"),
            ]
            fields = [(await anext(told))[0].fields for _ in freed]
            with pytest.raises(ModelNotFound):
                await caches.clear("z", "all")
            return [freed, fields]

    freed, fields = asyncio.run(main())
    assert freed == [5000, 5000, 0]
    assert fields == [
        {"what": "cleared", "model": None, "tier": "all", "freed_bytes": 5000},
        {"what": "cleared", "model": "a", "tier": "hot", "freed_bytes": 5000},
        {"what": "cleared", "model": None, "tier": "ssd", "freed_bytes": 0},
    ]
    assert shelf.cleared == [None, "a"]


def test_the_summary_adds_up_all_models() -> None:
    async def main() -> Mapping[str, object]:
        backend = FakeBackend()
        async with pool(backend) as models:
            for name in "ab":
                await use(models, name)
            return Caches(Shelf(), models, EventHub()).summary()

    assert asyncio.run(main()) == {
        "enabled": True,
        "bytes": {"hot": 5000, "ssd": 0},
        "max_bytes": {"hot": 9000, "ssd": 0},
        "pinned_bytes": 1000,
        "entries": 21,
        "evictions": 3,
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "ssd": {"state": "off", "degraded": False, "reason": None, "queued_bytes": 0, "counts": {}},
    }


# -- explaining -------------------------------------------------------------------------------------------------------


def explained(model: str, seen: str, *asked: str) -> list[CacheExplanation]:
    """What a model that was given `seen` (and answered it in one token) says of each of `asked`, which are bytes."""

    async def main() -> list[CacheExplanation]:
        async with engine(cached(model)) as running:
            await Running(running, job(list(seen.encode()), 1)).result()
            return [await explain(running, TokenPrompt(list(text.encode()))) for text in asked]

    return asyncio.run(main())


def test_a_prompt_that_is_stored_is_matched_but_for_its_last_token() -> None:
    assert explained("llama", "x" * 40, "x" * 40, "x" * 20) == [
        CacheExplanation(40, 39, "full"),
        CacheExplanation(20, 19, "full"),
    ]


def test_a_difference_is_shown_with_the_text_around_it_on_both_sides() -> None:
    (found,) = explained("llama", "You are helpful. It is Monday, as ever.", "You are helpful. It is Friday, as ever.")
    at = len("You are helpful. It is ")
    assert (found.prompt_tokens, found.matched_tokens, found.reason) == (39, at, "differs")
    assert found.differs_at is not None
    assert found.differs_at.token == at
    assert found.differs_at.prompt_text == " helpful. It is Friday, as ever."
    assert found.differs_at.stored_text.startswith(" helpful. It is Monday, a")  # to its block's end


def test_nothing_in_common_is_nothing_stored() -> None:
    assert explained("llama", "abc", "xyz") == [CacheExplanation(3, 0, "nothing_stored")]


def test_a_recurrent_model_says_that_a_checkpoint_is_missing() -> None:
    (found,) = explained("qwen3_next", "x" * 40, "x" * 30 + "y" * 5)
    assert (found.matched_tokens, found.reason) == (0, "no_checkpoint")
    assert isinstance(found.differs_at, Difference)
    assert found.differs_at.token == 30


def test_a_model_without_a_cache_says_that_it_is_disabled() -> None:
    async def main() -> CacheExplanation:
        async with engine(loaded("llama")) as running:
            return await explain(running, TextPrompt("abc"))

    assert asyncio.run(main()) == CacheExplanation(3, 0, "disabled")


def test_asking_changes_no_count() -> None:
    model = cached("llama")

    async def main() -> None:
        async with engine(model) as running:
            await Running(running, job([1, 2, 3], 1)).result()
            await explain(running, TokenPrompt([1, 2, 3]))

    asyncio.run(main())
    assert model.cache is not None
    assert model.cache.stats().lookups == 1
