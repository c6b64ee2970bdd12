"""Requests that begin together with one prefix: the same arrays until they part, and nobody sees another's writes."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from omlxd.cache.hot import HotTier
from tests.cache import running, synthetic
from tests.cache.running import PLENTY, TOLERANCE, model, oracle, prompt
from tests.cache.synthetic import assert_restored, feed, new_cache
from tests.cache.test_properties import LAYOUTS
from tests.models import MODELS


def stored(layout, tokens):
    cache = new_cache(vars(synthetic)[layout](), HotTier(PLENTY))
    hit = cache.lookup(tokens)
    feed(hit.caches, tokens, 0, len(tokens))
    cache.publish(tokens, hit.caches, len(tokens))
    cache.checkpoint(tokens, hit.caches, len(tokens))
    return cache


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_one_writes_reaches_neither_the_others_nor_what_is_stored(layout):
    shared = [1, 2, 0, 1, 2, 2, 0, 1, 1, 0]
    cache = stored(layout, shared)
    tails = ([3, 4, 5, 6, 7, 8, 9], [5, 5, 5], [7], [3, 4])
    prompts = [[*shared, *tail] for tail in tails]
    with cache.sharing():
        hits = [cache.lookup(tokens) for tokens in prompts]
    for hit, tokens in zip(hits, prompts, strict=True):
        assert hit.num_tokens == len(shared)
        for at in range(len(shared), len(tokens)):  # token by token: a ring is then written in place
            feed(hit.caches, tokens, at, at + 1)
    for hit, tokens in zip(hits, prompts, strict=True):
        assert_restored(hit.caches, tokens, len(tokens))
    assert_restored(cache.lookup([*shared, 9]).caches, shared, len(shared))


def large():
    """A cache that has 1,024 tokens of four heads, and a prompt of one more."""
    cache = new_cache([KVCache()], HotTier(PLENTY), block=256)
    tokens = list(range(1025))
    hit = cache.lookup(tokens)
    hit.caches[0].update_and_fetch(mx.ones((1, 4, 1024, 64)), mx.ones((1, 4, 1024, 64)))
    cache.publish(tokens, hit.caches, 1024)
    hit.release()
    return cache, tokens


def test_they_take_the_memory_of_one_and_it_goes_with_the_last():
    cache, tokens = large()
    before = mx.get_active_memory()
    alone = cache.lookup(tokens)
    one = mx.get_active_memory() - before
    assert one >= 2 * 4 * 1024 * 64 * 4
    del alone
    with cache.sharing():
        hits = [cache.lookup(tokens) for _ in range(5)]
        assert mx.get_active_memory() - before <= one * 1.1
    del hits
    assert mx.get_active_memory() - before <= one * 0.1


def test_the_last_one_left_writes_in_place():
    """mlx copies an array that others have, and only then: sharing must not cost a request that is alone a copy."""
    cache, tokens = large()
    with cache.sharing():
        hits = [cache.lookup(tokens) for _ in range(2)]
    del hits[0]
    (leaf,) = hits[0].caches
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    leaf.update_and_fetch(mx.zeros((1, 4, 1, 64)), mx.zeros((1, 4, 1, 64)))
    mx.eval(leaf.keys, leaf.values)
    assert mx.get_peak_memory() - before < leaf.keys.nbytes / 2


@pytest.mark.parametrize("name", MODELS)
def test_every_layout_goes_on_from_what_it_shares_as_from_nothing(name):
    shared, tails = prompt(40), (prompt(9, seed=1), prompt(3, seed=2), prompt(5, seed=3))
    cache = running.new_cache(name)
    first = cache.lookup([*shared, 0])
    model(name)(mx.array([shared]), cache=first.caches)
    cache.publish([*shared, 0], first.caches, len(shared))
    cache.checkpoint([*shared, 0], first.caches, len(shared))
    with cache.sharing():
        hits = [cache.lookup([*shared, *tail]) for tail in tails]
    for hit, tail in zip(hits, tails, strict=True):
        tokens = [*shared, *tail]
        assert hit.num_tokens == len(shared)
        logits = model(name)(mx.array([tokens[hit.num_tokens :]]), cache=hit.caches)[0, -1].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits)
        _, cold = oracle(name, tokens, 1)
        assert mx.abs(logprobs - cold[0]).max().item() < TOLERANCE
