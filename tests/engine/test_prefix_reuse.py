"""Every prompt is computed once: what is reused, what is kept by requests that leave, and who waits for whom."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from omlxd.cache.hot import HotTier
from omlxd.cache.keys import MediaSpan
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import Hit, PrefixCache
from omlxd.engine.api import Cancelled, EngineFailed, GenerationResult
from omlxd.engine.engine import Engine
from omlxd.engine.model import LoadedModel
from omlxd.engine.prefill import new_caches
from omlxd.engine.sampling_settings import SamplingSettings
from tests.engine.running import Running, assert_is_the_cold_run, cached, engine, job, loaded
from tests.engine.watched import Watched
from tests.models import MODELS, VOCABULARY

BLOCK = 16


def tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(count)]


def in_turn(model: LoadedModel, *prompts: list[int], **limits: Any) -> list[GenerationResult]:
    """Runs the prompts one after another, six tokens each; every answer must be the cold run's."""

    async def main() -> list[GenerationResult]:
        async with engine(model, **limits) as running:
            return [await Running(running, job(prompt, 6, logprobs=20)).result() for prompt in prompts]

    results = asyncio.run(main())
    plain = model.model.inner if isinstance(model.model, Watched) else model.model
    for result in results:
        assert_is_the_cold_run(plain, result)
    assert model.cache is not None
    model.cache.check()
    assert model.cache.stats().pinned_nbytes == 0
    return results


def reused(results: list[GenerationResult]) -> list[int]:
    return [result.usage.cached_tokens for result in results]


def computed(model: Watched) -> int:
    """Prompt tokens that went through the model in passes of more than one token."""
    return sum(rows * count for rows, count in model.calls if count > 1)


# -- reuse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_sent_again_or_extended_is_computed_once(name: str) -> None:
    prompt = tokens(75)
    model = cached(name)
    first = in_turn(model, prompt)[0]
    again, extended, other = in_turn(
        model, prompt, [*prompt, *first.token_ids, *tokens(20, 1)], [*prompt[:40], *tokens(30, 2)]
    )
    assert again.usage.cached_tokens == 74
    assert extended.usage.cached_tokens == 75 + 6
    at_checkpoints = MODELS[name].recurrent
    assert other.usage.cached_tokens == (0 if at_checkpoints else 40)


def test_cached_tokens_are_true_to_the_token() -> None:
    watched = Watched()
    model = cached("watched", watched)
    in_turn(model, tokens(100))
    watched.calls.clear()
    (result,) = in_turn(model, [*tokens(57), *tokens(30, 1)])
    assert result.usage.cached_tokens == 57
    assert computed(watched) == 87 - 57


def test_a_request_may_want_no_cache() -> None:
    model = cached("llama")

    async def main() -> list[GenerationResult]:
        async with engine(model) as running:
            return [
                await Running(running, job(tokens(50), 4, use_cache=use)).result() for use in (False, True, False, True)
            ]

    assert reused(asyncio.run(main())) == [0, 0, 0, 49]


def test_blocks_are_stored_while_an_answer_grows() -> None:
    model = cached("llama")

    async def main() -> GenerationResult:
        async with engine(model, max_batch=2) as running:
            long = Running(running, job(tokens(20), 200, stream=True))
            ids: list[int] = []
            async for event in long.stream:
                ids += event.token_ids  # type: ignore[union-attr]
                if len(ids) >= 60:
                    break
            result = await Running(running, job([*tokens(20), *ids[:60], 1], 3)).result()
            long.stream.cancel()
            return result

    assert asyncio.run(main()).usage.cached_tokens >= 64


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "kimi_linear", "falcon_h1"])
def test_recurrent_models_keep_a_checkpoint_where_a_message_ends(name: str) -> None:
    model = cached(name)
    system = tokens(50)

    async def main() -> list[GenerationResult]:
        async with engine(model, prefill_chunk=32) as running:
            prompts = [[*system, *tokens(20, n)] for n in range(3)]
            return [await Running(running, job(p, 6, logprobs=20, boundaries=[50])).result() for p in prompts]

    results = asyncio.run(main())
    assert reused(results) == [0, 50, 50]
    for result in results:
        assert_is_the_cold_run(model.model, result)


# -- requests that leave ----------------------------------------------------------------------------------------------


def test_a_client_that_gives_up_and_comes_back_gets_further_each_time() -> None:
    watched = Watched()
    model = cached("watched", watched)
    prompt = tokens(400)

    async def attempt(running: Engine) -> int:
        """Leaves in the middle of the fourth turn; returns how many tokens were reused."""
        reached, left = threading.Event(), threading.Event()
        began = len(watched.calls)

        def pause_in_the_fourth(_: Any) -> None:
            if len(watched.calls) == began + 3:
                reached.set()
                left.wait(10)

        watched.before = pause_in_the_fourth
        client = Running(running, job(prompt, 3))
        assert await asyncio.to_thread(reached.wait, 10)
        client.stream.cancel()
        left.set()
        with pytest.raises(Cancelled) as caught:
            await client.result()
        assert caught.value.partial is not None
        return caught.value.partial.usage.cached_tokens

    async def main() -> list[int]:
        async with engine(model, prefill_chunk=32) as running:
            return [await attempt(running) for _ in range(3)]

    got = asyncio.run(main())
    assert got[0] < got[1] < got[2]
    assert in_turn(model, prompt)[0].usage.cached_tokens > got[2]


@pytest.mark.parametrize("name", MODELS)
def test_a_preempted_request_goes_on_as_if_it_had_stayed(name: str) -> None:
    """Two rows of batch requests; an interactive one takes the newest's place, which then comes back."""
    model = cached(name)

    async def main() -> tuple[list[GenerationResult], GenerationResult]:
        async with engine(model, max_batch=2, prefill_chunk=32) as running:
            batch = [
                Running(running, job(tokens(30, n), 80, logprobs=20, stream=True, batch_priority=True))
                for n in range(2)
            ]
            await batch[1].first_token()
            urgent = await Running(running, job(tokens(20, 9), 5, logprobs=20)).result()
            return [await each.result() for each in batch], urgent

    results, urgent = asyncio.run(main())
    for result in [*results, urgent]:
        assert_is_the_cold_run(model.model, result)
    assert [len(result.token_ids) for result in results] == [80, 80]
    assert reused(results) == [0, 0]  # of the prompt as it came
    assert model.cache is not None
    assert model.cache.stats().hits == 1  # the one who came back
    model.cache.check()
    assert model.cache.stats().pinned_nbytes == 0


def test_a_preempted_seeded_request_draws_the_same_tokens() -> None:
    settings = SamplingSettings(seed=5, temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3)

    async def main(*, disturbed: bool) -> GenerationResult:
        async with engine(cached("llama"), max_batch=1) as running:
            row = Running(running, job(tokens(30), 40, stream=True, batch_priority=True, sampling=settings))
            if disturbed:
                await row.first_token()
                await Running(running, job(tokens(20, 9), 5)).result()
            return await row.result()

    calm, disturbed = asyncio.run(main(disturbed=False)), asyncio.run(main(disturbed=True))
    assert calm.token_ids == disturbed.token_ids
    assert calm.text == disturbed.text


# -- one prefill per prefix -------------------------------------------------------------------------------------------


def test_clients_with_one_cold_prefix_cost_one_prefill_of_it() -> None:
    watched = Watched()
    model = cached("watched", watched)
    system = tokens(300)

    async def main() -> list[GenerationResult]:
        async with engine(model, prefill_chunk=64) as running:
            each = [Running(running, job([*system, *tokens(10, n + 1)], 4, logprobs=20)) for n in range(8)]
            return await asyncio.gather(*(one.result() for one in each))

    results = asyncio.run(main())
    for result in results:
        assert_is_the_cold_run(watched.inner, result)
    assert computed(watched) <= 310 + 7 * (10 + BLOCK)
    assert all(cached_tokens >= 288 for cached_tokens in reused(results)[1:])


def test_recurrent_models_share_a_prefix_up_to_its_checkpoint() -> None:
    model = cached("qwen3_next")
    system = tokens(200)

    async def main() -> list[GenerationResult]:
        async with engine(model, prefill_chunk=64) as running:
            jobs = [job([*system, *tokens(10, n + 1)], 4, logprobs=20, boundaries=[200]) for n in range(4)]
            each = [Running(running, one) for one in jobs]
            return await asyncio.gather(*(one.result() for one in each))

    results = asyncio.run(main())
    assert reused(results) == [0, 200, 200, 200]
    for result in results:
        assert_is_the_cold_run(model.model, result)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_when_the_one_who_computes_a_prefix_goes_another_takes_over(how: str) -> None:
    watched = Watched()
    model = cached("watched", watched)
    system = tokens(300)
    reached = threading.Event()

    def watch(_: Any) -> None:
        if len(watched.calls) == 2:
            reached.set()
            if how == "failed":
                watched.before = lambda _: None
                raise RuntimeError("made to fail")

    watched.before = watch

    async def main() -> list[GenerationResult]:
        async with engine(model, prefill_chunk=64) as running:
            leader = Running(running, job([*system, 1], 4))
            followers = [Running(running, job([*system, *tokens(10, n)], 4, logprobs=20)) for n in range(3)]
            await asyncio.to_thread(reached.wait, 10)
            leader.stream.cancel()
            with pytest.raises((Cancelled, EngineFailed)):
                await leader.result()
            return await asyncio.gather(*(one.result() for one in followers))

    results = asyncio.run(main())
    for result in results:
        assert_is_the_cold_run(watched.inner, result)
    assert computed(watched) <= 2 * 64 + 300 + 3 * (10 + BLOCK) + 64


def test_others_pass_those_who_wait_for_a_prefix() -> None:
    watched = Watched()
    model = cached("watched", watched)
    ends: list[str] = []

    async def finished(name: str, each: Running) -> None:
        await each.result()
        ends.append(name)

    async def main() -> None:
        async with engine(model, max_batch=3, prefill_chunk=16) as running:
            shared = tokens(400)
            names = {"leader": [*shared, 1], "follower": [*shared, 2, 3], "other": tokens(10, 5)}
            await asyncio.gather(*(finished(name, Running(running, job(prompt, 2))) for name, prompt in names.items()))

    asyncio.run(main())
    assert ends[0] == "other"


# -- recovery ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "llama4_text"])
def test_a_row_that_fails_by_itself_takes_nobody_with_it(name: str) -> None:
    model = cached(name)

    async def main() -> list[GenerationResult]:
        async with engine(model, max_batch=4) as running:
            good = [Running(running, job(tokens(20 + n, n), 40, logprobs=20, stream=True)) for n in range(2)]
            for each in good:
                await each.first_token()
            # A bias for a token that does not exist: refused long before the engine, a row's own fault inside it.
            bad = Running(running, job(tokens(5, 7), 5, logit_bias={VOCABULARY * 2: "x"}))
            with pytest.raises(EngineFailed):
                await bad.result()
            return [await each.result() for each in good]

    for result in asyncio.run(main()):
        assert_is_the_cold_run(model.model, result)
        assert len(result.token_ids) == 40


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "cohere2"])
def test_windows_smaller_than_a_block_lose_nothing_of_a_long_prompt_or_answer(name: str) -> None:
    model = cached(name, block_size=64)  # the window is 16

    async def main() -> list[GenerationResult]:
        async with engine(model, prefill_chunk=16) as running:
            first = await Running(running, job(tokens(100), 70, logprobs=20)).result()
            cuts = [90, 100, 130, 165]
            whole = [*tokens(100), *first.token_ids]
            return [first] + [
                await Running(running, job([*whole[:cut], *tokens(3, cut)], 5, logprobs=20)).result() for cut in cuts
            ]

    results = asyncio.run(main())
    assert reused(results)[1:] == [90, 100, 130, 165]
    for result in results:
        assert_is_the_cold_run(model.model, result)


def test_running_answers_go_on_between_restored_prefixes_that_take_long() -> None:
    now, seen = [0.0], [""]

    class SlowToRestore(PrefixCache):
        def lookup(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> Hit:
            now[0] += 0.1
            seen.append("restored")
            return super().lookup(tokens, media)

    watched = Watched()
    watched.before = lambda tokens: seen.append("computed")
    layout = ModelLayout(new_caches(watched))
    cache = SlowToRestore(root=b"slow", layout=layout, tier=HotTier(1 << 30), block_size=16)
    model = replace(loaded("watched", watched), cache=cache)

    async def main() -> None:
        async with engine(model, clock=lambda: now[0], max_decode_stall_ms=80) as running:
            stream = Running(running, job(tokens(5), 100, stream=True))
            await stream.first_token()
            seen.clear()
            await asyncio.gather(*(Running(running, job(tokens(20, n), 2)).result() for n in range(2, 8)))
            stream.stream.cancel()

    asyncio.run(main())
    assert seen.count("restored") == 6
    assert ("restored", "restored") not in set(itertools.pairwise(seen))
