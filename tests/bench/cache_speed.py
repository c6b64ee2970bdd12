"""The cache's two speed figures, on a tiny llama with 2,000 shared tokens.

Run by hand: python -m tests.bench.cache_speed. Lookup with restore must cost at most 2 % of the cold prefill it saves,
publishing at most 3 % of the prefill it follows. Prints medians of several rounds, each on a cold cache.
"""

from __future__ import annotations

import random
import statistics
import time

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from omlxd.cache.hot import HotTier
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from tests.models import VOCABULARY, build

TOKENS, CHUNK, ROUNDS = 2000, 512, 9


def main() -> None:
    model = build("llama", context=4096)
    draw = random.Random(0)
    figures = [_round(model, [draw.randrange(VOCABULARY) for _ in range(TOKENS)]) for _ in range(ROUNDS + 1)][1:]
    prefill, publish, lookup = (statistics.median(column) for column in zip(*figures, strict=True))
    print(f"cold prefill of {TOKENS} tokens in chunks of {CHUNK}: {prefill * 1e3:.2f} ms")
    print(f"publish during it: {publish * 1e3:.3f} ms = {publish / prefill:.2%} (limit 3 %)")
    print(f"lookup and restore: {lookup * 1e3:.3f} ms = {lookup / prefill:.2%} (limit 2 %)")


def _round(model, tokens: list[int]) -> tuple[float, float, float]:
    """Seconds of prefill, of publishing after each chunk, and of a lookup that reuses all of it."""
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
    return prefill, publish, lookup


if __name__ == "__main__":
    main()
