"""Whatever is restored, answers like a cold run: every layout, every way of sharing a prefix."""

from __future__ import annotations

import random

import mlx.core as mx
import pytest
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from tests.cache.running import (
    BLOCK,
    TOLERANCE,
    assert_cold,
    assert_equal,
    generate,
    model,
    new_cache,
    oracle,
    prefill,
    prompt,
)
from tests.models import MODELS, WINDOW

LAYOUTS = pytest.mark.parametrize("name", MODELS)
CUT = pytest.mark.parametrize("name", [name for name, tiny in MODELS.items() if not tiny.recurrent])
BATCHED = pytest.mark.parametrize("name", [name for name, tiny in MODELS.items() if tiny.batches])
ASKED = prompt(70)


@LAYOUTS
def test_one_changed_token_moves_the_logits_ten_times_further_than_the_tolerance(name):
    """Else the proofs below would prove nothing: early tokens, and tokens just outside the window, still matter."""
    changed = [*ASKED[:20], (ASKED[20] + 1) % 320, *ASKED[21:]]
    difference = mx.abs(oracle(name, ASKED, 12)[1][0] - oracle(name, changed, 1)[1][0]).max()
    assert float(difference) > 10 * TOLERANCE


@LAYOUTS
def test_a_repeated_prompt_answers_like_a_cold_run(name):
    cache = new_cache(name)
    first = generate(name, cache, ASKED, chunk=15)
    again = generate(name, cache, ASKED)
    third = generate(name, cache, ASKED, chunk=3)
    for run in (first, again, third):
        assert_cold(name, ASKED, run)
    assert first.cached_tokens == 0
    # All but the token to compute logits from; a recurrent model goes back to the last chunk's end before it.
    assert again.cached_tokens == (60 if MODELS[name].recurrent else 69)


@LAYOUTS
def test_a_conversation_goes_on_from_the_end_of_the_answer(name):
    cache = new_cache(name)
    answer = generate(name, cache, ASKED, chunk=32)
    longer = [*answer.tokens, *prompt(9, seed=1)]
    turn = generate(name, cache, longer, chunk=5)
    assert turn.cached_tokens == len(answer.tokens)
    assert_cold(name, longer, turn)


@LAYOUTS
def test_an_answer_is_regenerated_from_the_prompt(name):
    """The answer that is thrown away had wrapped the window; its prompt is still there as it was."""
    cache = new_cache(name)
    generate(name, cache, ASKED, n=2 * WINDOW, chunk=23)
    other = [*ASKED[:-1], (ASKED[-1] + 1) % 320]
    assert_cold(name, ASKED, generate(name, cache, ASKED))
    assert_cold(name, other, generate(name, cache, other))


# At the first token, around a block's edge, within a block, and inside and outside the last window of the 70 tokens.
@pytest.mark.parametrize("shared", [1, BLOCK - 1, BLOCK, BLOCK + 1, 40, 3 * BLOCK, 53, 54, 55, 69])
@LAYOUTS
def test_prompts_that_diverge_share_what_is_before(name, shared):
    cache = new_cache(name)
    generate(name, cache, ASKED, n=1, chunk=19)
    diverging = [*ASKED[:shared], *prompt(7, seed=2)]
    run = generate(name, cache, diverging, n=4)
    assert_cold(name, diverging, run)
    assert run.cached_tokens == (shared // 19 * 19 if MODELS[name].recurrent else shared)
    assert_cold(name, ASKED, generate(name, cache, ASKED, n=4))


@pytest.mark.parametrize("chunk", [1, 5, 15, 16, 17, 33])
@LAYOUTS
def test_every_position_restores_whatever_the_chunks_were(name, chunk):
    """Chunks below, at and above the window and block of 16. One cold pass has the logits of all positions."""
    cache, net = new_cache(name), model(name)
    sequence = prompt(64, seed=3)
    cold = net(mx.array(sequence)[None], cache=make_prompt_cache(net))[0]
    hit = cache.lookup(sequence)
    prefill(net, cache, sequence, hit, chunk=chunk)
    hit.release()
    positions = random.Random(chunk).sample(range(1, 64), 6)
    for position in positions:
        restored = cache.lookup([*sequence[:position], 0])
        start = restored.num_tokens
        assert start == (position // chunk * chunk if MODELS[name].recurrent else position)
        rest = net(mx.array(sequence[start:])[None], cache=restored.caches)[0]
        assert float(mx.abs(rest - cold[start:]).max()) <= TOLERANCE
        restored.release()
    cache.check()


@LAYOUTS
def test_an_answer_that_wraps_the_window_is_published_while_it_is_decoded(name):
    """In steps of one block, from caches whose ring has turned; every published position restores."""
    cache, net = new_cache(name), model(name)
    asked = prompt(10, seed=4)
    ids, logprobs = oracle(name, asked, 60)
    sequence = [*asked, *ids]
    hit = cache.lookup(asked)
    prefill(net, cache, asked, hit, chunk=10)
    for position in range(len(asked), 69):
        net(mx.array([[sequence[position]]]), cache=hit.caches)
        if (position + 1) % BLOCK == 0 or position == 68:
            cache.checkpoint(sequence, hit.caches, position + 1)
            cache.check()
    hit.release()
    for position in (69, 64, 50, 48, 33, 21):
        restored = cache.lookup([*sequence[:position], 0])
        start = restored.num_tokens
        assert start == (max(p for p in (16, 32, 48, 64, 69) if p <= position) if MODELS[name].recurrent else position)
        logits = net(mx.array(sequence[start:69])[None], cache=restored.caches) if start < 69 else None
        if logits is not None:
            steps = logits[0] - mx.logsumexp(logits[0], axis=-1, keepdims=True)
            assert float(mx.abs(steps - logprobs[start - len(asked) + 1 : 60]).max()) <= TOLERANCE
        restored.release()


# ---------------------------------------------------------------------------------------------------------------------
# In a batch


def _row(name, cache, tokens):
    """A row's caches and how they came to be: all but the last token computed."""
    hit = cache.lookup(tokens)
    if hit.num_tokens < len(tokens) - 1:
        prefill(model(name), cache, tokens[:-1], hit, chunk=9)
    hit.release()
    return hit


def _decode(batch, steps):
    """Each row's ids and log-probabilities, and what its caches held when it ended."""
    ids, logprobs, ended = {}, {}, {}
    for _ in range(steps):
        for response in batch.next():
            ids.setdefault(response.uid, []).append(response.token)
            logprobs.setdefault(response.uid, []).append(response.logprobs)
            if response.finish_reason:
                ended[response.uid] = (response.all_tokens, response.prompt_cache)
    return ids, logprobs, ended


@BATCHED
def test_two_restored_rows_and_a_cold_one_share_a_batch(name):
    steps = 20  # the window of 16 wraps in every row
    cache, net = new_cache(name), model(name)
    generate(name, cache, ASKED, n=1, chunk=31)
    prompts = [ASKED, [*ASKED[:37], *prompt(3, seed=5)], prompt(21, seed=6)]
    hits = [_row(name, cache, tokens) for tokens in prompts]
    assert [hit.num_tokens > 0 for hit in hits] == [True, True, False]
    running = None
    for uid, (tokens, hit) in enumerate(zip(prompts, hits, strict=True)):
        alone = PromptProcessingBatch(net, [uid], [hit.caches], tokens=[list(tokens[:-1])], max_tokens=[steps])
        row = alone.generate([[tokens[-1]]])
        if running is None:
            running = row
        else:
            running.extend(row)
    ids, logprobs, ended = _decode(running, steps)
    for uid, tokens in enumerate(prompts):
        assert_equal(ids[uid], mx.stack(logprobs[uid]), oracle(name, tokens, steps))
        # The row taken out of the batch is published, and the next turn goes on from it.
        held, caches = ended[uid]
        cache.checkpoint(held, caches, len(held))
        cache.check()
        longer = [*held, *prompt(5, seed=7)]
        turn = generate(name, cache, longer, n=4)
        assert turn.cached_tokens == len(held)
        assert_cold(name, longer, turn)


@BATCHED
def test_rows_prefilled_together_are_published_one_by_one(name):
    cache, net = new_cache(name), model(name)
    prompts = [prompt(41, seed=8), prompt(9, seed=9), prompt(26, seed=10)]
    # In one step: padded rows of Mamba layers go wrong over several (test_contracts.py).
    together = PromptProcessingBatch(net, [0, 1, 2], [make_prompt_cache(net) for _ in prompts])
    together.prompt([list(tokens) for tokens in prompts])
    for row, tokens in enumerate(prompts):
        cache.checkpoint(tokens, together.extract_cache(row), len(tokens))
        cache.check()
    for tokens in prompts:
        longer = [*tokens, *prompt(6, seed=11)]
        run = generate(name, cache, longer, n=4)
        assert run.cached_tokens == len(tokens)
        assert_cold(name, longer, run)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "cohere2", "llama4", "llama"])
def test_windows_smaller_than_a_block_lose_nothing_when_published_at_the_cache_s_stride(name):
    """Blocks of 40 tokens, windows of 16: a block is put together from what each publish still saw."""
    cache, net = new_cache(name, block=40), model(name)
    assert cache.publish_stride == (40 if name == "llama" else WINDOW)
    sequence = prompt(90, seed=14)
    cold = net(mx.array(sequence)[None], cache=make_prompt_cache(net))[0]
    caches = make_prompt_cache(net)
    for position in range(90):
        net(mx.array([[sequence[position]]]), cache=caches)
        if (position + 1) % cache.publish_stride == 0 or position == 89:
            cache.publish(sequence, caches, position + 1)
            cache.check()
    for position in (1, 15, 33, 40, 41, 57, 79, 80, 89):
        restored = cache.lookup([*sequence[:position], 400])
        assert restored.num_tokens == position
        rest = net(mx.array(sequence[position:])[None], cache=restored.caches)[0]
        assert float(mx.abs(rest - cold[position:]).max()) <= TOLERANCE
        restored.release()


@CUT
def test_a_block_is_usable_from_where_its_windows_are_whole(name):
    """Published only at the end of a decoded answer: the ring holds the last 16 tokens, full attention holds all."""
    cache, net = new_cache(name), model(name)
    asked = prompt(8, seed=12)
    ids, _ = oracle(name, asked, 57)
    sequence = [*asked, *ids]
    caches = make_prompt_cache(net)
    for token in sequence[:64]:
        net(mx.array([[token]]), cache=caches)
    cache.publish(sequence, caches, 64)
    cache.check()
    windowed = name in {"gemma3_text", "gpt_oss", "cohere2", "llama4"}
    assert cache.match_length([*sequence[:64], 0]) == 64
    assert cache.match_length([*sequence[:60], 400]) == (0 if windowed else 60)
    # Once the tokens were computed again, nothing is missing any more.
    assert_cold(name, sequence[:60], generate(name, cache, sequence[:60], n=4, chunk=13))
    assert cache.match_length([*sequence[:47], 400]) == 47
    run = generate(name, cache, [*sequence[:47], *prompt(4, seed=13)], n=4)
    assert_cold(name, [*sequence[:47], *prompt(4, seed=13)], run)


@pytest.mark.parametrize("length", [70, 256, 257])
def test_a_restored_cache_has_room_for_the_next_token_and_is_not_copied_for_it(length):
    cache, asked = new_cache("llama"), prompt(length)
    generate("llama", cache, asked, n=1)
    longer = [*asked, 5, 6]
    hit = cache.lookup(longer)
    room = hit.caches[0].keys.shape[-2]
    assert hit.num_tokens < room <= hit.num_tokens + 256
    prefill(model("llama"), cache, longer[: hit.num_tokens + 1], hit, chunk=1)
    assert {leaf.keys.shape[-2] for leaf in hit.caches} == {room}
