"""What the engine relies on in mlx-lm's batch caches and in mlx. If one fails after an upgrade, read it first of all.

Each test pins one fact that engine/batch.py, decoding.py, prefill.py or sampling.py is built on.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)


def test_the_batch_caches_state_is_keys_values_offset_padding_and_end() -> None:
    merged = BatchKVCache.merge([filled(3), filled(5)])
    keys, values, offset, left_padding, stop = merged.state
    assert (keys.shape, values.shape, stop) == ((2, 1, 5, 4), (2, 1, 5, 4), 5)
    assert (offset.tolist(), left_padding.tolist()) == ([3, 5], [2, 0])


def filled(length: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, length, 4)), mx.ones((1, 1, length, 4)))
    return cache


def test_filter_and_extend_keep_the_order_of_rows_and_their_lengths() -> None:
    first, second = BatchKVCache.merge([filled(5), filled(2), filled(3)]), BatchKVCache.merge([filled(4)])
    first.filter([0, 2])
    first.extend(second)
    assert [first.extract(row).offset for row in range(3)] == [5, 3, 4]


@pytest.mark.parametrize("cache", [ChunkedKVCache, ConcatenateKVCache, QuantizedKVCache])
def test_these_caches_cannot_be_merged_yet(cache: type) -> None:
    assert "merge" not in vars(cache), f"{cache.__name__} has learned to merge: engine/prefill.py can let it batch"


@pytest.mark.parametrize("cache", [KVCache, RotatingKVCache, ArraysCache])
def test_these_caches_can_be_merged(cache: type) -> None:
    assert "merge" in vars(cache)


def test_a_key_is_two_words_and_rows_with_keys_of_their_own_draw_alone() -> None:
    keys = mx.array([[0, 7], [0, 8]], dtype=mx.uint32)
    logits = mx.random.normal((2, 50), key=mx.random.key(1))
    together = mx.vmap(lambda row, key: mx.random.categorical(row, key=key))(logits, keys)
    alone = [mx.random.categorical(logits[n], key=mx.random.key(7 + n)).item() for n in range(2)]
    assert together.tolist() == alone
