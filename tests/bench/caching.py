"""What the cache in memory costs a prompt: publishing beside its prefill, and the lookup that saves it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from omlxd.cache.hot import HotTier
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from tests.bench.bench_model import fresh, small_llama
from tests.bench.figures import Figure, Plan

TOKENS, CHUNK = 2000, 512


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    rounds = [_round() for _ in range(1 + plan.repeats(9))][1:]
    prefill, publish, lookup = (list(column) for column in zip(*rounds, strict=True))
    reference = f"the prefill of {TOKENS} tokens"
    yield Figure("cache.publish", "publishing a prompt", "ms", "lower", publish, reference, prefill, target=0.03)
    yield Figure(
        "cache.lookup", "looking it up and restoring it", "ms", "lower", lookup, reference, prefill, target=0.02
    )


def _round() -> tuple[float, float, float]:
    """Milliseconds of prefill, of publishing after each chunk, and of a lookup that reuses all of it."""
    model, tokens = small_llama(), fresh(TOKENS)
    layout = ModelLayout(make_prompt_cache(model))
    cache = PrefixCache(root=bytes(32), layout=layout, tier=HotTier(1 << 30))
    caches = layout.fresh()
    prefill = publish = 0.0
    for start in range(0, TOKENS, CHUNK):
        stop = min(TOKENS, start + CHUNK)
        began = time.perf_counter()
        model(mx.array(tokens[start:stop])[None], cache=caches)
        mx.eval([leaf.state for leaf in caches])
        computed = time.perf_counter()
        cache.publish(tokens, caches, stop)
        publish += time.perf_counter() - computed
        prefill += computed - began
    began = time.perf_counter()
    hit = cache.lookup([*tokens, 1])
    lookup = time.perf_counter() - began
    assert hit.num_tokens == TOKENS
    hit.release()
    return prefill * 1e3, publish * 1e3, lookup * 1e3
