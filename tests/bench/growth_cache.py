"""The cache as it grows: prompts of 1k to 32k tokens, 1k to 200k stored blocks, and more and more sessions.

Blocks are published by the real cache from the caches of a llama of one narrow layer, a few tokens each, so that two
hundred thousand of them fit; a lookup then walks the same tree as any other.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from omlxd.cache.hot import HotTier
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from tests.bench.bench_model import engine_on, fresh, small_llama, ttft_ms
from tests.bench.figures import Figure, Plan
from tests.bench.growth_engine import FLAT
from tests.bench.living import home_with, spawn

PROMPTS = (1024, 4096, 16_384, 32_768)
BLOCKS = (1000, 10_000, 50_000, 200_000)
SESSIONS = (10, 100, 500)
BLOCK_TOKENS, CHAIN = 4, 64  # each stored prompt is a chain of so many blocks


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    async for figure in prompts(PROMPTS[:2] if plan.quick else PROMPTS):
        yield figure
    for figure in blocks(BLOCKS[:2] if plan.quick else BLOCKS):
        yield figure
    for figure in sessions(SESSIONS[:2] if plan.quick else SESSIONS):
        yield figure


async def prompts(lengths: tuple[int, ...]) -> AsyncIterator[Figure]:
    async with engine_on(small_llama()) as engine:
        for length in lengths:
            cold, warm = [], []
            for _ in range(2):
                prompt = fresh(length)
                cold.append(length / await ttft_ms(engine, prompt) * 1e3)
                warm.append(await ttft_ms(engine, prompt))
            yield Figure(f"growth.prefill@{length}", "prefill", "tokens/s", "higher", cold, x=length)
            yield Figure(f"growth.warm@{length}", "first token, all but one stored", "ms", "lower", warm, x=length)


def blocks(counts: tuple[int, ...]) -> Iterator[Figure]:
    caches = [KVCache()]
    layout = ModelLayout(caches)
    cache = PrefixCache(root=bytes(32), layout=layout, tier=HotTier(8 << 30), block_size=BLOCK_TOKENS)
    rows = mx.zeros((1, 1, CHAIN * BLOCK_TOKENS, 8))
    caches[0].update_and_fetch(rows, rows)
    mx.eval(caches[0].state)
    stored, finding, publishing = 0, [], []
    for count in counts:
        while stored < count:
            cache.publish(fresh(CHAIN * BLOCK_TOKENS), caches, CHAIN * BLOCK_TOKENS)
            stored += CHAIN
        found, published = _cache_us(cache, caches)
        finding.append(found)
        publishing.append(published)
    for name, title, samples in (
        ("lookup", f"finding {CHAIN} blocks", finding),
        ("publish", "publishing a block", publishing),
    ):
        for count, each in zip(counts, samples, strict=True):
            yield Figure(f"growth.{name}@{count}", title, "µs", "lower", each, x=count)
        many, few = f"{title}, {counts[-1]} blocks stored", f"{counts[0]} stored"
        yield Figure(f"growth.{name}", many, "µs", "lower", samples[-1], few, samples[0], target=2 * FLAT)


def _cache_us(cache: PrefixCache, caches: list[KVCache]) -> tuple[list[float], list[float]]:
    """CPU of a match of a stored prompt, and of publishing one of the blocks of a new one."""
    finding, publishing = [], []
    for _ in range(20):
        prompt = fresh(CHAIN * BLOCK_TOKENS)
        began = time.thread_time()
        cache.publish(prompt, caches, len(prompt))
        publishing.append((time.thread_time() - began) / CHAIN * 1e6)
        began = time.thread_time()
        assert cache.match_length([*prompt, 1]) == len(prompt)
        finding.append((time.thread_time() - began) * 1e6)
    return finding, publishing


def sessions(counts: tuple[int, ...]) -> Iterator[Figure]:
    with home_with("llama") as daemon:
        spawn(daemon)
        prompt, made = fresh(300), 0
        for count in counts:
            saving = []
            while made < count:
                began = time.perf_counter()
                daemon.call("sessions.save", model="llama", name=f"s{made}", prompt=prompt)
                saving.append((time.perf_counter() - began) * 1e3)
                made += 1
            listing = []
            for _ in range(5):
                began = time.perf_counter()
                daemon.call("sessions.list", model="llama")
                listing.append((time.perf_counter() - began) * 1e3)
            yield Figure(f"growth.save@{count}", "saving a session", "ms", "lower", saving[-10:], x=count)
            yield Figure(f"growth.list@{count}", "listing all sessions", "ms", "lower", listing, x=count)
