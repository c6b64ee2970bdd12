"""What was computed once is there after a restart, for every layout, and as good as if it had never been away."""

from __future__ import annotations

import pytest

from omlxd.cache.hot import HotTier
from tests.cache.running import BLOCK, assert_cold, generate, prompt
from tests.cache.shelves import flush, of_model, open_store
from tests.models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_after_a_restart_a_prompt_is_found_as_if_nothing_had_stopped(name, tmp_path):
    tokens = prompt(60)
    store = open_store(tmp_path)
    here = of_model(store, name)
    first = generate(name, here.cache, tokens, chunk=13)
    longer = [*first.tokens, *prompt(5, seed=1)]
    part = [*tokens[:41], *prompt(9, seed=2)]
    expected = [here.cache.match_length(longer), here.cache.match_length(part)]
    assert store.close(30) == 0

    store = open_store(tmp_path)
    for asked, cached in zip((longer, part), expected, strict=True):
        later = of_model(store, name)
        later.fetch(asked)
        run = generate(name, later.cache, asked)
        assert run.cached_tokens == cached
        assert_cold(name, asked, run)
        later.cache.check()
    assert store.close(30) == 0


def test_what_is_evicted_before_it_is_written_is_still_found(tmp_path):
    store = open_store(tmp_path)
    tier = HotTier(1 << 30)
    here = of_model(store, "llama", tier)
    tokens = prompt(64)
    generate("llama", here.cache, tokens, n=1)
    tier.resize(0)
    tier.resize(1 << 30)
    assert here.cache.match_length(tokens) == 0
    here.fetch(tokens)
    assert here.cache.match_length(tokens) >= 3 * BLOCK
    flush(store)
    store.close(30)
