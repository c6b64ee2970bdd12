"""Whoever waits does not wait for ever, whoever asks is answered, and a request that warms the cache draws nothing."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from omlxd.cache.errors import CacheInvariantError
from omlxd.cache.hot import HotTier
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from omlxd.engine.api import Cancelled, EngineFailed, GenerationResult, Progress, QueueFull, Unsupported
from omlxd.engine.engine import Engine
from omlxd.engine.inbox import Close
from omlxd.engine.line import LONGEST_S
from omlxd.engine.prefill import new_caches
from omlxd.engine.request import Request, State
from tests.engine.running import Running, assert_is_the_cold_run, cached, engine, job, loaded, tokenizer
from tests.engine.test_metrics import Clock
from tests.engine.test_prefix_reuse import computed, tokens
from tests.engine.watched import Watched
from tests.models import MODELS


async def caught_up(running: Engine) -> None:
    """Until the engine has taken everything that was sent to it before."""
    await running.ask_cache(lambda cache: None)


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_a_request_that_waited_an_hour_for_a_row_ends_with_queue_full() -> None:
    clock = Clock()

    async def main() -> tuple[QueueFull, GenerationResult]:
        async with engine(cached("llama"), clock=clock, max_batch=1) as running:
            first = Running(running, job(tokens(20), 400, stream=True, arrived=clock()))
            await first.first_token()
            early = Running(running, job(tokens(10, 1), 2, arrived=clock()))
            await caught_up(running)
            clock.now += LONGEST_S / 2
            late = Running(running, job(tokens(10, 2), 2, arrived=clock()))
            await caught_up(running)
            clock.now += LONGEST_S / 2 + 2
            with pytest.raises(QueueFull) as caught:
                await early.result()
            first.stream.cancel()  # who had a row was left alone, and who came later gets it
            with pytest.raises(Cancelled):
                await first.result()
            return caught.value, await late.result()

    error, result = asyncio.run(main())
    assert error.fields == {"depth": 2, "retry_after_ms": 60_000}
    assert "it waited 3602 s" in error.message
    assert len(result.token_ids) == 2


def test_the_time_in_a_row_is_no_waiting() -> None:
    clock = Clock()
    request = Request(job(tokens(5), arrived=clock()), tokenizer(), clock)
    request.enter(State.PREFILL)
    clock.now += LONGEST_S * 2
    request.enter(State.HELD, "preempted by an interactive request")
    clock.now += 5
    request.enter(State.QUEUED)
    assert clock() - request.waits_since == 5


def test_who_is_held_is_told_why() -> None:
    """The first prompt stops before its first turn until the second came, and before its third until it was told."""
    watched = Watched()
    began, come, told = threading.Event(), threading.Event(), threading.Event()

    def hold_up(_: Any) -> None:
        began.set()
        assert come.wait(10)
        assert len(watched.calls) < 2 or told.wait(10)

    watched.before = hold_up

    async def main() -> Progress:
        async with engine(cached("watched", watched), prefill_chunk=16) as running:
            shared = tokens(300)
            leader = Running(running, job([*shared, 1], 2, id="leader"))
            await asyncio.to_thread(began.wait, 10)
            follower = Running(running, job([*shared, 2, 3], 2, progress=True))
            come.set()
            first = await anext(aiter(follower.stream))
            told.set()
            await asyncio.gather(leader.result(), follower.result())
            assert isinstance(first, Progress)
            return first

    first = asyncio.run(main())
    assert (first.phase, first.total) == ("held", 302)
    assert str(first.detail).startswith("leader computes its first ")


# -- questions --------------------------------------------------------------------------------------------------------


def test_a_question_is_answered_on_the_engine_thread_between_two_steps() -> None:
    async def main() -> list[str]:
        async with engine(cached("llama")) as running:
            busy = Running(running, job(tokens(10), 300, stream=True))
            await busy.first_token()
            while_busy = await running.ask_cache(lambda cache: threading.current_thread().name)
            busy.stream.cancel()
            with pytest.raises(Cancelled):
                await busy.result()
            return [while_busy, await running.ask_cache(lambda cache: threading.current_thread().name)]

    assert asyncio.run(main()) == ["engine-llama", "engine-llama"]


def test_a_questions_failure_is_the_askers_and_nobody_elses() -> None:
    def fails(cache: PrefixCache) -> int:
        return 1 // 0

    async def main() -> GenerationResult:
        async with engine(cached("llama")) as running:
            row = Running(running, job(tokens(10), 20))
            with pytest.raises(ZeroDivisionError):
                await running.ask_cache(fails)
            return await row.result()

    assert len(asyncio.run(main()).token_ids) == 20


def test_a_model_without_a_cache_has_no_answers() -> None:
    async def main() -> None:
        async with engine(loaded("llama")) as running:
            assert running.uncached == "the cache is switched off"
            with pytest.raises(Unsupported):
                await running.ask_cache(lambda cache: None)

    asyncio.run(main())


def test_a_model_whose_cache_broke_goes_on_without_and_says_so() -> None:
    class Broken(PrefixCache):
        """Finds itself inconsistent at the first block."""

        def publish(self, *args: Any, **kwargs: Any) -> int:
            raise CacheInvariantError("made to fail")

        def checkpoint(self, *args: Any, **kwargs: Any) -> bool:
            raise CacheInvariantError("made to fail")

    plain = loaded("llama")
    layout = ModelLayout(new_caches(plain.model))
    model = replace(plain, cache=Broken(root=b"broken", layout=layout, tier=HotTier(1 << 20), block_size=16))

    async def main() -> str | None:
        async with engine(model) as running:
            assert running.uncached is None
            result = await Running(running, job(tokens(50), 4, logprobs=20)).result()
            assert_is_the_cold_run(model.model, result)
            return running.uncached

    assert "inconsistent" in str(asyncio.run(main()))


def test_a_question_to_an_engine_that_ends_is_answered_too() -> None:
    async def main() -> list[Any]:
        async with engine(cached("llama")) as running:
            running.close(Close("unloaded"))
            asked = [asyncio.ensure_future(running.ask_cache(lambda cache: 1)) for _ in range(3)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            with pytest.raises(EngineFailed):
                await running.ask_cache(lambda cache: 1)
            return answers

    assert all(answer == 1 or isinstance(answer, EngineFailed) for answer in asyncio.run(main()))


# -- warming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_warm_prompt_is_stored_and_nothing_is_drawn(name: str) -> None:
    model = cached(name)
    prompt = tokens(70)

    async def main() -> list[GenerationResult]:
        async with engine(model, prefill_chunk=32) as running:
            warm = [await Running(running, job(prompt, 1, warm=True)).result() for _ in range(2)]
            assert running.metrics.counters["generated_tokens"] == 0
            return [*warm, await Running(running, job(prompt, 6, logprobs=20)).result()]

    first, again, answer = asyncio.run(main())
    assert (first.text, first.usage.prompt_tokens, first.usage.cached_tokens) == ("", 70, 0)
    assert again.usage.cached_tokens == answer.usage.cached_tokens == 69
    assert_is_the_cold_run(model.model, answer)
    assert model.cache is not None
    model.cache.check()
    assert model.cache.stats().pinned_nbytes == 0


def test_one_token_needs_no_warming() -> None:
    async def main() -> GenerationResult:
        async with engine(cached("llama")) as running:
            return await Running(running, job([1], 1, warm=True)).result()

    assert asyncio.run(main()).usage.prompt_tokens == 1


def test_a_warm_request_takes_turns_and_a_row_like_others() -> None:
    watched = Watched()
    both_came = threading.Event()

    def wait_for_both(_: Any) -> None:
        assert both_came.wait(10)

    watched.before = wait_for_both

    async def main() -> list[str]:
        ends: list[str] = []

        async def finished(name: str, each: Running) -> None:
            await each.result()
            ends.append(name)

        async with engine(cached("watched", watched), max_batch=2, prefill_chunk=16) as running:
            warm = Running(running, job(tokens(400), 1, warm=True))
            short = Running(running, job(tokens(10, 5), 2))
            both_came.set()
            await asyncio.gather(finished("warm", warm), finished("short", short))
        return ends

    assert asyncio.run(main()) == ["short", "warm"]


def test_who_needs_what_is_being_warmed_waits_for_it() -> None:
    watched = Watched()
    prompt = tokens(300)

    async def main() -> GenerationResult:
        async with engine(cached("watched", watched), prefill_chunk=64) as running:
            warm = Running(running, job(prompt, 1, warm=True))
            answer = await Running(running, job([*prompt, 1, 2], 3)).result()
            await warm.result()
            return answer

    assert asyncio.run(main()).usage.cached_tokens >= 288
    assert computed(watched) <= 300 + 16


def test_a_warm_request_that_is_cancelled_keeps_what_it_computed() -> None:
    watched = Watched()
    reached, left = threading.Event(), threading.Event()

    def wait_in_the_fifth_turn(_: Any) -> None:
        if len(watched.calls) == 4:
            reached.set()
            assert left.wait(10)

    watched.before = wait_in_the_fifth_turn

    async def main() -> GenerationResult:
        async with engine(cached("watched", watched), prefill_chunk=32) as running:
            warm = Running(running, job(tokens(400), 1, warm=True))
            await asyncio.to_thread(reached.wait, 10)
            warm.stream.cancel()
            left.set()
            with pytest.raises(Cancelled):
                await warm.result()
            return await Running(running, job(tokens(400), 1, warm=True)).result()

    assert asyncio.run(main()).usage.cached_tokens > 0


def test_a_caches_numbers_are_those_of_the_work() -> None:
    """Forty tokens, then forty of which 32 are there, then the same again: 40 + 8 + 1 tokens are computed."""
    model = cached("llama")
    other = [*tokens(32), *tokens(8, 1)]

    async def main() -> None:
        async with engine(model) as running:
            for prompt in (tokens(40), other, other):
                await Running(running, job(prompt, 2)).result()

    asyncio.run(main())
    assert model.cache is not None
    stats = model.cache.stats()
    assert (stats.lookups, stats.hits, stats.reused_tokens, stats.computed_tokens) == (3, 2, 32 + 39, 40 + 8 + 1)
