"""What the engine relies on in mlx-lm's batch classes. If one of these fails after an upgrade, read it before anything.

Each test pins one fact that engine/batch.py, prefill.py or sampling.py is built on.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, StopSequences, generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from omlxd.engine.batch import UNLIMITED
from tests.models import build

PROMPT = [1, 2, 3, 4, 5]


def joined(prompts: list[list[int]], **fields: Any) -> GenerationBatch:
    model = build("llama")
    caches = [make_prompt_cache(model) for _ in prompts]
    rows: dict[str, Any] = {
        "tokens": [[] for _ in prompts],
        "samplers": [None] * len(prompts),  # filter wants lists as long as the batch
        "logits_processors": [[] for _ in prompts],
        "stop_sequences": [StopSequences()] * len(prompts),
        "max_tokens": [UNLIMITED] * len(prompts),
        **fields,
    }
    batch = PromptProcessingBatch(model, [f"u{n}" for n in range(len(prompts))], caches, **rows)
    return batch.generate(prompts)


def test_a_batch_answers_with_uid_token_and_logprobs_of_every_row_in_order() -> None:
    responses = joined([PROMPT, PROMPT[:2]]).next()
    assert [response.uid for response in responses] == ["u0", "u1"]
    assert all(response.logprobs.shape == (320,) for response in responses)
    assert all(response.finish_reason is None for response in responses)


def test_no_stop_sequence_and_a_huge_limit_never_end_a_row() -> None:
    batch = joined([PROMPT])
    assert all(batch.next()[0].finish_reason is None for _ in range(40))


def test_one_sampler_shared_by_all_rows_is_called_once_a_step_with_all_of_them() -> None:
    shapes: list[tuple[int, ...]] = []

    def sampler(logprobs: mx.array) -> mx.array:
        shapes.append(logprobs.shape)
        return mx.argmax(logprobs, axis=-1)

    batch = joined([PROMPT, PROMPT[:3]], samplers=[sampler, sampler])
    batch.next()
    assert shapes == [(2, 320), (2, 320)]


def test_samplers_are_a_public_list_in_the_order_of_uids_that_may_be_replaced() -> None:
    calls: list[int] = []

    def sampler(logprobs: mx.array) -> mx.array:
        calls.append(logprobs.shape[0])
        return mx.argmax(logprobs, axis=-1)

    batch = joined([PROMPT, PROMPT])
    batch.samplers = [sampler] * 2
    batch.next()
    assert calls == [2]


def test_a_processor_is_called_for_its_row_with_the_newest_token_last() -> None:
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        assert logits.shape == (1, 320)
        seen.append(tokens.tolist())  # type: ignore[arg-type]
        return logits

    batch = joined([PROMPT, PROMPT], logits_processors=[[processor], []])
    first, _ = batch.next()
    assert seen[0] == PROMPT[-1:] or seen[0] == PROMPT  # the prompt's last token ends its first context
    assert seen[1][-1] == first.token


def test_after_a_step_the_caches_hold_the_token_that_was_returned() -> None:
    batch = joined([PROMPT])
    batch.next()
    keys, _, _, left_padding, stop = batch.prompt_cache[0].state
    assert stop - left_padding.item() == len(PROMPT) + 1
    assert keys.shape[0] == 1


def test_the_batch_caches_state_is_keys_values_offset_padding_and_end() -> None:
    merged = BatchKVCache.merge([filled(3), filled(5)])
    keys, values, offset, left_padding, stop = merged.state
    assert (keys.shape, values.shape, stop) == ((2, 1, 5, 4), (2, 1, 5, 4), 5)
    assert (offset.tolist(), left_padding.tolist()) == ([3, 5], [2, 0])


def filled(length: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, length, 4)), mx.ones((1, 1, length, 4)))
    return cache


def test_filter_and_extend_keep_the_order_of_rows() -> None:
    first, second = joined([PROMPT, PROMPT[:2], PROMPT[:3]]), joined([PROMPT[:4]])
    first.filter([0, 2])
    first.extend(second)
    assert first.uids == ["u0", "u2", "u0"]
    assert len(first.next()) == 3


@pytest.mark.parametrize("cache", [ChunkedKVCache, ConcatenateKVCache, QuantizedKVCache])
def test_these_caches_cannot_be_merged_yet(cache: type) -> None:
    assert "merge" not in vars(cache), f"{cache.__name__} has learned to merge: engine/prefill.py can let it batch"


@pytest.mark.parametrize("cache", [KVCache, RotatingKVCache, ArraysCache])
def test_these_caches_can_be_merged(cache: type) -> None:
    assert "merge" in vars(cache)


def test_a_generator_for_one_row_continues_given_caches_and_stays_on_the_given_stream() -> None:
    model = build("llama")
    caches = make_prompt_cache(model)
    model(mx.array(PROMPT[:-1])[None], cache=caches)
    stream = mx.default_stream(mx.default_device())
    row = generate_step(mx.array(PROMPT[-1:]), model, stream, max_tokens=-1, prompt_cache=caches)
    token, logprobs = next(row)
    assert isinstance(token, int)
    assert logprobs.shape == (320,)
    assert caches[0].offset == len(PROMPT) + 1  # the returned token is in the cache already
    assert mx.default_stream(mx.default_device()) == stream
    row.close()


def test_a_key_is_two_words_and_rows_with_keys_of_their_own_draw_alone() -> None:
    keys = mx.array([[0, 7], [0, 8]], dtype=mx.uint32)
    logits = mx.random.normal((2, 50), key=mx.random.key(1))
    together = mx.vmap(lambda row, key: mx.random.categorical(row, key=key))(logits, keys)
    alone = [mx.random.categorical(logits[n], key=mx.random.key(7 + n)).item() for n in range(2)]
    assert together.tolist() == alone
