"""Runs a tiny model over a prefix cache as a scheduler would, and compares it with a cold run of the same prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as memoized

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from omlxd.cache.hot import HotTier
from omlxd.cache.keys import MediaSpan
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import Hit, PrefixCache
from tests.models import VOCABULARY, build, cold_run

BLOCK = 16
TOLERANCE = 1e-3
PLENTY = 1 << 30


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids, the same for the same seed; a longer one starts with the shorter."""
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(length)]


@memoized
def model(name: str, seed: int = 0) -> nn.Module:
    return build(name, seed)


@memoized
def _oracle(name: str, tokens: tuple[int, ...], n: int) -> tuple[list[int], mx.array]:
    return cold_run(model(name), tokens, n)


def oracle(name: str, tokens: Sequence[int], n: int) -> tuple[list[int], mx.array]:
    """The cold run, computed once per session for the same prompt."""
    return _oracle(name, tuple(tokens), n)


def new_cache(name: str, *, budget: int = PLENTY, block: int = BLOCK, root: bytes = bytes(32)) -> PrefixCache:
    layout = ModelLayout(make_prompt_cache(model(name)))
    return PrefixCache(root=root, layout=layout, tier=HotTier(budget), block_size=block)


@dataclass(frozen=True, slots=True)
class Run:
    """What one request produced; `tokens` are those its caches hold at the end."""

    ids: list[int]
    logprobs: mx.array
    cached_tokens: int
    tokens: list[int]


def prefill(net: nn.Module, cache: PrefixCache, tokens: Sequence[int], hit: Hit, *, chunk: int, media=()) -> mx.array:
    """Computes what the hit lacks, publishing (with a checkpoint) after each chunk; returns the last logits."""
    for start in range(hit.num_tokens, len(tokens), chunk):
        stop = min(len(tokens), start + chunk)
        logits = net(mx.array(tokens[start:stop])[None], cache=hit.caches)
        cache.publish(tokens, hit.caches, stop, media)
        if cache.recurrent:
            cache.checkpoint(tokens, hit.caches, stop, media)
        cache.check()
    return logits[0, -1]


def generate(
    name: str,
    cache: PrefixCache,
    tokens: Sequence[int],
    n: int = 12,
    *,
    chunk: int = 1000,
    media: Sequence[MediaSpan] = (),
    net: nn.Module | None = None,
) -> Run:
    """A greedy request of batch 1. The answer's blocks are published at its end."""
    net = net or model(name)
    hit = cache.lookup(tokens, media)
    logits = prefill(net, cache, tokens, hit, chunk=chunk, media=media)
    ids: list[int] = []
    steps: list[mx.array] = []
    for _ in range(n):
        if ids:
            logits = net(mx.array([[ids[-1]]]), cache=hit.caches)[0, -1]
        steps.append(logits - mx.logsumexp(logits, keepdims=True))
        ids.append(int(mx.argmax(logits)))
    held = [*tokens, *ids[:-1]]
    cache.checkpoint(held, hit.caches, len(held), media)
    hit.release()
    cache.check()
    logprobs = mx.stack(steps)
    mx.eval(logprobs)  # for tests that run this on a thread of its own
    return Run(ids, logprobs, hit.num_tokens, held)


def assert_equal(ids: Sequence[int], logprobs: mx.array, cold: tuple[Sequence[int], mx.array]) -> None:
    """The same ids, and log-probabilities within 1e-3 at every step: ids alone hide a dropped token (CASES.md)."""
    expected, reference = cold
    furthest = float(mx.abs(logprobs - reference).max())
    assert furthest <= TOLERANCE
    assert list(ids) == list(expected)


def assert_cold(name: str, tokens: Sequence[int], run: Run) -> None:
    assert_equal(run.ids, run.logprobs, oracle(name, tokens, len(run.ids)))
