"""Each model has its own cache, keeps it while others work, and loses it when it is no longer the same model."""

from __future__ import annotations

import threading

import pytest
from mlx_lm.models.cache import make_prompt_cache

from omlxd.cache.hot import HotTier
from omlxd.cache.identity import CacheIdentity
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.registry import CacheRegistry
from tests.cache.running import BLOCK, PLENTY, assert_cold, assert_equal, generate, model, prompt
from tests.models import cold_run


def identity(weights: str, **parts) -> CacheIdentity:
    return CacheIdentity(
        weights=weights, description="d", adapter="", layout="l", kv="", precision="", block_size=BLOCK, **parts
    )


@pytest.fixture
def registry():
    return CacheRegistry(HotTier(PLENTY))


def layout(name="llama"):
    return ModelLayout(make_prompt_cache(model(name)))


def test_models_keep_their_caches_side_by_side(registry):
    """The same prompt in turns, on two models of one shape: each hits its own blocks and answers as if alone."""
    tokens = prompt(50)
    one, other = registry.open("one", identity("1"), layout()), registry.open("other", identity("2"), layout())
    second = model("llama", seed=2)
    cold = cold_run(second, tokens, 12)
    for turn in range(2):
        first = generate("llama", one, tokens)
        assert_cold("llama", tokens, first)
        run = generate("llama", other, tokens, net=second)
        assert_equal(run.ids, run.logprobs, cold)
        assert first.cached_tokens == run.cached_tokens == (49 if turn else 0)
    registry.check()


def test_a_model_that_comes_back_finds_what_it_left(registry):
    tokens = prompt(40)
    generate("llama", registry.open("m", identity("1"), layout()), tokens)
    registry.open("another", identity("2"), layout("qwen3"))
    again = registry.open("m", identity("1"), layout())
    assert generate("llama", again, tokens).cached_tokens == 39


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_a_model_that_comes_back_on_another_thread_finds_it_too(registry, name):
    """Each load has an engine thread of its own, with streams of its own: what is stored is evaluated."""
    tokens, runs = prompt(40), []

    def engine() -> None:
        runs.append(generate(name, registry.open("m", identity(name), layout(name)), tokens, n=4, chunk=13))

    for _ in range(2):
        thread = threading.Thread(target=engine)
        thread.start()
        thread.join(timeout=60)
    first, again = runs
    assert (first.cached_tokens, again.cached_tokens > 0) == (0, True)
    for run in runs:
        assert_cold(name, tokens, run)


def test_another_configuration_retires_the_old_cache(registry):
    tokens = prompt(40)
    old = registry.open("m", identity("1"), layout())
    generate("llama", old, tokens)
    new = registry.open("m", identity("1 with an adapter"), layout())
    assert new.match_length(tokens) == 0
    assert registry.tier.stats().used_bytes == 0
    # An engine that still has the retired one goes on, uncached.
    run = generate("llama", old, tokens)
    assert run.cached_tokens == 0
    assert_cold("llama", tokens, run)
    assert registry.tier.stats().used_bytes == 0


def test_two_names_of_one_model_share_a_cache_that_lives_as_long_as_either(registry):
    tokens = prompt(40)
    one = registry.open("alias", identity("1"), layout())
    assert registry.open("name", identity("1"), layout()) is one
    generate("llama", one, tokens)
    registry.open("alias", identity("2"), layout())
    assert one.match_length(tokens) == 39


def test_closing_drops_what_a_live_request_uses_without_harming_it(registry):
    tokens = prompt(40)
    cache = registry.open("m", identity("1"), layout())
    generate("llama", cache, tokens)
    hit = cache.lookup(tokens)
    registry.close(identity("1"))
    registry.close(identity("never opened"))
    assert registry.tier.stats().used_bytes == 0
    assert [leaf.offset for leaf in hit.caches] == [39, 39]
    hit.release()
    registry.tier.check()
    assert registry.stats() == {}


def test_closing_all_leaves_an_empty_tier(registry):
    caches = [registry.open(name, identity(name), layout()) for name in ("a", "b", "c")]
    for cache in caches:
        generate("llama", cache, prompt(30), n=1)
    assert [stats.blocks for stats in registry.stats().values()] == [2, 2, 2]
    registry.close_all()
    assert registry.tier.stats().entries == 0
    assert registry.open("a", identity("a"), layout()).match_length(prompt(30)) == 0


def test_caches_are_found_by_their_models_names(registry):
    one = registry.open("one", identity("1"), layout())
    registry.open("other", identity("2"), layout())
    registry.open("alias", identity("1"), layout())
    assert registry.by_name()["alias"] is registry.by_name()["one"] is one
    registry.close(identity("1"))
    assert list(registry.by_name()) == ["other"]


def test_what_is_cleared_is_told_in_bytes_and_is_no_eviction(registry):
    cache = registry.open("m", identity("1"), layout())
    generate("llama", cache, prompt(40), n=1)
    held = cache.stats()
    assert held.blocks > 0
    assert cache.clear() == held.nbytes
    assert (cache.stats().nbytes, cache.stats().evicted) == (0, 0)
    assert cache.clear() == 0


def test_evictions_are_counted_for_the_model_that_lost_something(registry):
    one, other = (registry.open(name, identity(name), layout()) for name in ("one", "other"))
    for cache in (one, other):
        generate("llama", cache, prompt(40), n=1)
    held = one.stats()
    registry.tier.shrink(held.nbytes)  # the least recently used go first, and those are all of `one`
    assert one.stats().evicted == held.blocks + held.checkpoints
    assert (one.stats().blocks, other.stats().evicted) == (0, 0)
    generate("llama", one, prompt(40), n=1)
    assert one.stats().evicted == held.blocks


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_merged_partial_blocks_are_no_evictions(registry, name):
    """Answers grow token by token, so partial blocks are stored and swallowed by longer ones all the time."""
    cache = registry.open("m", identity("1"), layout(name))
    for length in (20, 27, 33, 50):
        generate(name, cache, prompt(length), n=6)
    assert cache.stats().evicted == 0
    cache.check()
