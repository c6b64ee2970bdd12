"""What a colder tier is told, and that what it hands back is as good as what was never away."""

from __future__ import annotations

import pytest
from mlx_lm.models.cache import make_prompt_cache

from omlxd.cache.hot import HotTier
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from tests.cache.running import BLOCK, PLENTY, assert_cold, generate, model, prompt
from tests.cache.synthetic import Shelf
from tests.models import MODELS


def new_cache(name, tier, store=None):
    layout = ModelLayout(make_prompt_cache(model(name)))
    return PrefixCache(root=b"r", layout=layout, tier=tier, block_size=BLOCK, store=store)


@pytest.mark.parametrize("name", MODELS)
def test_what_was_offered_can_be_taken_back(name):
    shelf, tokens = Shelf(), prompt(60)
    first = generate(name, new_cache(name, HotTier(PLENTY), shelf), tokens, chunk=13)
    later = new_cache(name, HotTier(PLENTY))
    assert later.adopt(first.tokens, shelf.records) > 0
    later.check()
    longer = [*first.tokens, *prompt(5, seed=1)]
    run = generate(name, later, longer)
    assert run.cached_tokens == len(first.tokens)
    assert_cold(name, longer, run)
    assert later.adopt(first.tokens, shelf.records) == 0  # nothing twice


def test_every_block_and_checkpoint_is_offered_once_its_arrays_are_computed():
    shelf = Shelf()
    run = generate("qwen3_next", new_cache("qwen3_next", HotTier(PLENTY), shelf), prompt(40), chunk=16)
    kinds = [(type(record).__name__, record.spec.start, record.spec.stop) for record in shelf.records]
    assert kinds == [
        ("StoredBlock", 0, 16),
        ("StoredCheckpoint", 0, 16),
        ("StoredBlock", 16, 32),
        ("StoredCheckpoint", 16, 32),
        ("StoredBlock", 32, 40),
        ("StoredCheckpoint", 32, 40),
        ("StoredBlock", 32, 48),
        ("StoredBlock", 48, len(run.tokens)),
        ("StoredCheckpoint", 48, len(run.tokens)),
    ]


def test_a_block_without_its_parent_is_not_taken_and_one_without_room_neither():
    shelf, tokens = Shelf(), prompt(48)
    generate("llama", new_cache("llama", HotTier(PLENTY), shelf), tokens, n=1, chunk=16)
    first, second, third = shelf.records
    tier = HotTier(PLENTY)
    cache = new_cache("llama", tier)
    assert cache.adopt(tokens, [second, third]) == 0
    assert cache.adopt(tokens, [first, third]) == 1
    block = tier.stats().used_bytes
    tier.resize(block)
    assert cache.adopt(tokens, [second]) == 0  # its parent does not make room for it
    assert cache.match_length([*tokens, 1]) == 16
    cache.check()
    tier.resize(2 * block)
    assert cache.adopt(tokens, [second, third]) == 1
    assert cache.match_length([*tokens, 1]) == 32
    cache.check()
