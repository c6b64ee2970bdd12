"""How answers end, how requests are cancelled or refused, and what one request's failure does to others."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

from omlxd.engine.api import (
    Cancelled,
    Delta,
    EngineFailed,
    GenerationResult,
    Progress,
    QueueFull,
    ShuttingDown,
    TextPrompt,
)
from omlxd.engine.engine import Engine
from omlxd.engine.inbox import Close
from omlxd.engine.request import Request
from omlxd.engine.sampling_settings import SamplingSettings
from omlxd.engine.scheduler import SchedulerLimits
from tests.engine.running import Running, assert_is_the_cold_run, engine, job, loaded
from tests.engine.watched import Watched
from tests.models import IM_END, scripted

PROMPT = [1, 2, 3]


def says(text: str) -> Any:
    """A model that answers with these bytes, one token each, and then IM_END for ever."""
    ids = list(text.encode())
    return loaded("scripted", scripted(dict(zip(ids, [*ids[1:], IM_END], strict=True)), otherwise=ids[0]))


def answer(model: Any, **changes: Any) -> GenerationResult:
    async def main() -> GenerationResult:
        async with engine(model) as running:
            return await Running(running, job(PROMPT, **changes)).result()

    return asyncio.run(main())


# -- ends -------------------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_the_answer_and_is_no_part_of_it() -> None:
    result = answer(says("abc"), max_tokens=50, stop_ids=frozenset({IM_END}))
    assert (result.text, result.finish_reason, result.token_ids) == ("abc", "stop", list(b"abc"))
    assert result.usage.completion_tokens == 3


def test_max_tokens_ends_the_answer_with_length() -> None:
    result = answer(says("abc"), max_tokens=2)
    assert (result.text, result.finish_reason, result.usage.completion_tokens) == ("ab", "length", 2)


def test_one_token_is_one_token() -> None:
    assert answer(says("abc"), max_tokens=1).text == "a"


def test_an_answer_may_be_empty() -> None:
    result = answer(says("abc"), stop_ids=frozenset({ord("a")}))
    assert (result.text, result.finish_reason, result.usage.completion_tokens) == ("", "stop", 0)


def test_a_stop_string_ends_the_answer_before_it_and_keeps_the_tokens_that_made_it() -> None:
    result = answer(says("ab cde"), stop=["cd"])
    assert (result.text, result.finish_reason, result.token_ids) == ("ab ", "stop", list(b"ab cd"))


def test_a_stop_string_in_the_prompt_stops_nothing() -> None:
    model = says("xyz")

    async def main() -> GenerationResult:
        async with engine(model) as running:
            return await Running(running, job(list(b"stop "), 3, stop=["stop"])).result()

    assert asyncio.run(main()).text == "xyz"


def test_what_looked_like_a_stop_string_is_in_the_text_of_a_cut_answer() -> None:
    assert answer(says("abc"), max_tokens=2, stop=["bcd"]).text == "ab"


@pytest.mark.parametrize(("stop", "text"), [([], "ok \U0001f44b!"), (["!"], "ok \U0001f44b")])
def test_streamed_and_whole_answers_are_the_same(stop: list[str], text: str) -> None:
    async def main() -> tuple[list[Delta | Progress], GenerationResult]:
        async with engine(says("ok \U0001f44b!")) as running:
            streaming = Running(running, job(PROMPT, stream=True, stop=stop, stop_ids=frozenset({IM_END})))
            return await streaming.events(), await streaming.result()

    events, result = asyncio.run(main())
    deltas = [event for event in events if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == result.text == text
    assert [id for delta in deltas for id in delta.token_ids] == list(result.token_ids)
    assert not any("\ufffd" in delta.text for delta in deltas)


def test_a_reader_who_comes_late_gets_everything_in_one_delta() -> None:
    async def main() -> tuple[list[Delta | Progress], GenerationResult]:
        async with engine(loaded("llama")) as running:
            streaming = Running(running, job(PROMPT, 30, stream=True, logprobs=2))
            result = await streaming.result()
            return await streaming.events(), result

    events, result = asyncio.run(main())
    assert len(events) == 1
    assert isinstance(events[0], Delta)
    assert events[0].token_ids == result.token_ids
    assert events[0].logprobs == result.logprobs


def test_times_and_counts_are_told() -> None:
    result = answer(loaded("llama"), max_tokens=20)
    assert result.usage.prompt_tokens == len(PROMPT)
    assert result.timings.ttft_ms >= result.timings.queue_ms >= 0
    assert result.timings.tokens_per_s > 0


# -- rows belong to their requests ------------------------------------------------------------------------------------


def test_a_seeded_request_draws_the_same_in_company() -> None:
    flat = scripted({}, sharpness=0.0)
    settings = SamplingSettings(seed=7, temperature=1.0)

    async def main() -> tuple[GenerationResult, GenerationResult, list[GenerationResult]]:
        async with engine(loaded("flat", flat)) as running:
            alone = await Running(running, job(PROMPT, 24, sampling=settings)).result()
            neighbours = [
                Running(running, job([n + 1] * (n + 1), 5 + 7 * n, sampling=SamplingSettings(seed=n, temperature=1.0)))
                for n in range(3)
            ]
            together = await Running(running, job(PROMPT, 24, sampling=settings)).result()
            return alone, together, [await neighbour.result() for neighbour in neighbours]

    alone, together, neighbours = asyncio.run(main())
    assert alone.token_ids == together.token_ids
    assert len({tuple(result.token_ids[:5]) for result in [alone, *neighbours]}) == 4


@pytest.mark.parametrize("order", list(itertools.permutations(["plain", "banned", "logprobs"])))
def test_a_ban_holds_for_its_own_request_whatever_order_they_come_in(order: tuple[str, ...]) -> None:
    model = loaded("llama")
    jobs = {
        "plain": lambda: job(PROMPT, 10),
        "banned": lambda: job(PROMPT, 10, logit_bias={banned: float("-inf")}),
        "logprobs": lambda: job([5, 6], 14, logprobs=20),
    }

    async def main() -> dict[str, GenerationResult]:
        async with engine(model) as running:
            under_way = {name: Running(running, jobs[name]()) for name in order}
            return {name: await each.result() for name, each in under_way.items()}

    banned = answer(model, max_tokens=1).token_ids[0]
    results = asyncio.run(main())
    assert banned in results["plain"].token_ids
    assert banned not in results["banned"].token_ids
    assert_is_the_cold_run(model.model, results["plain"])
    assert_is_the_cold_run(model.model, results["logprobs"])


# -- prefill in turns -------------------------------------------------------------------------------------------------


def test_a_running_stream_gets_a_token_between_any_two_turns_of_a_long_prompt() -> None:
    model = Watched()

    async def main() -> None:
        async with engine(loaded("watched", model), prefill_chunk=32) as running:
            first = Running(running, job(PROMPT, 60, stream=True))
            await first.first_token()
            await Running(running, job([7] * 400, 2)).result()
            await first.result()

    asyncio.run(main())
    later = [tokens for _, tokens in model.calls[1:]]  # the first call is the stream's own prompt
    assert max(later) <= 32
    assert not any(a > 1 and b > 1 for a, b in itertools.pairwise(later))


def test_what_was_drawn_is_told_before_another_prompt_has_its_turn() -> None:
    model = Watched()
    seen, on_time = 0, []

    def before(tokens: mx.array) -> None:
        if tokens.shape[1] > 1 and (1, 1) in model.calls:
            deadline, drawn = time.monotonic() + 10, model.calls.count((1, 1))
            while seen < drawn and time.monotonic() < deadline:
                time.sleep(0.001)
            on_time.append(seen >= drawn)

    async def main() -> None:
        nonlocal seen
        async with engine(loaded("watched", model)) as running:
            model.before = before
            talking = Running(running, job([3, 4], 60, stream=True))
            other: Running | None = None
            async for event in talking.stream:
                seen += len(event.token_ids) if isinstance(event, Delta) else 0
                if seen > 5 and other is None:
                    other = Running(running, job([5] * 40, 1))
            assert other is not None
            await other.result()

    asyncio.run(main())
    assert on_time == [True]


def test_a_short_prompt_is_not_padded_to_a_long_one() -> None:
    model = Watched()

    async def main() -> None:
        async with engine(loaded("watched", model), prefill_chunk=64) as running:
            long, short = Running(running, job([7] * 300, 2)), Running(running, job([8] * 5, 2))
            await asyncio.gather(long.result(), short.result())

    asyncio.run(main())
    assert (1, 5) in model.calls  # the short one's prompt, alone


def test_progress_of_a_prompt_is_told_in_tokens() -> None:
    async def main() -> list[Delta | Progress]:
        async with engine(loaded("llama"), prefill_chunk=32) as running:
            return await Running(running, job([7] * 100, 1, progress=True)).events()

    events = asyncio.run(main())
    assert events[-1] == Progress("prefill", 100, 100)


# -- cancelling -------------------------------------------------------------------------------------------------------


async def cancel_in(phase: str, running: Engine, model: Watched) -> Cancelled:
    """Starts a request, cancels it twice in the given phase and returns its error. The engine has one row."""
    blocker = Running(running, job(PROMPT, 40)) if phase == "queued" else None
    reached = threading.Event()
    if phase == "prefill":
        model.before = lambda tokens: reached.set()
    victim = Running(running, job([9] * (400 if phase == "prefill" else 5), 200, stream=True))
    if phase == "prefill":
        assert await asyncio.to_thread(reached.wait, 10)
    if phase == "decode":
        await victim.first_token()
    victim.stream.cancel("enough")
    victim.stream.cancel("again")
    with pytest.raises(Cancelled) as caught:
        await victim.result()
    if blocker is not None:
        await blocker.result()
    return caught.value


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
def test_a_cancelled_request_ends_with_what_it_has_and_the_next_one_runs(phase: str) -> None:
    model = Watched()

    async def main() -> Cancelled:
        async with engine(loaded("watched", model), max_batch=1, prefill_chunk=16) as running:
            error = await cancel_in(phase, running, model)
            assert len((await Running(running, job(PROMPT, 3)).result()).token_ids) == 3
            return error

    error = asyncio.run(main())
    assert error.reason == "enough"
    assert error.partial is not None
    assert error.partial.finish_reason == "cancelled"
    assert (error.partial.usage.completion_tokens > 0) == (phase == "decode")
    if phase == "prefill":
        assert sum(tokens for _, tokens in model.calls) < 200  # of 400


def test_cancelling_after_the_end_changes_nothing() -> None:
    async def main() -> None:
        async with engine(loaded("llama")) as running:
            done = Running(running, job(PROMPT, 2))
            result = await done.result()
            done.stream.cancel()
            running.abort(done.job.id, None)
            assert await done.result() == result

    asyncio.run(main())


# -- refusing ---------------------------------------------------------------------------------------------------------


def test_more_than_rows_and_queue_hold_are_refused_at_once_and_the_rest_finish_in_order() -> None:
    ends: list[str] = []

    async def finished(each: Running) -> None:
        await each.result()
        ends.append(each.job.id)

    async def main() -> tuple[list[Running], list[QueueFull]]:
        accepted, refused = [], []
        async with engine(loaded("llama"), max_batch=2, max_queue=8) as running:
            for _ in range(50):
                try:
                    accepted.append(Running(running, job(PROMPT, 4)))
                except QueueFull as error:
                    refused.append(error)
            await asyncio.gather(*(finished(each) for each in accepted))
        return accepted, refused

    accepted, refused = asyncio.run(main())
    assert (len(accepted), len(refused)) == (10, 40)
    assert refused[0].fields["depth"] == 8
    assert ends == [each.job.id for each in accepted]


# -- failing ----------------------------------------------------------------------------------------------------------


def fail_once(model: Watched) -> None:
    def raise_once(tokens: mx.array) -> None:
        model.before = lambda tokens: None
        raise RuntimeError("made to fail")

    model.before = raise_once


def test_a_failing_step_ends_its_requests_and_the_next_ones_are_served() -> None:
    model = Watched()

    async def main() -> GenerationResult:
        async with engine(loaded("watched", model)) as running:
            doomed = Running(running, job(PROMPT, 100, stream=True))
            await doomed.first_token()
            fail_once(model)
            with pytest.raises(EngineFailed):
                await doomed.result()
            return await Running(running, job(PROMPT, 5, logprobs=5)).result()

    assert_is_the_cold_run(model.inner, asyncio.run(main()))


def test_a_failing_prefill_leaves_running_rows_alone() -> None:
    model = Watched()

    def fail_on_long(tokens: mx.array) -> None:
        if tokens.shape[1] > 8:
            raise RuntimeError("made to fail")

    async def main() -> GenerationResult:
        async with engine(loaded("watched", model), prefill_chunk=32) as running:
            row = Running(running, job(PROMPT, 40, stream=True, logprobs=5))
            await row.first_token()
            model.before = fail_on_long
            with pytest.raises(EngineFailed):
                await Running(running, job([9] * 200, 5)).result()
            return await row.result()

    assert_is_the_cold_run(model.inner, asyncio.run(main()))


def test_an_engine_that_fails_again_and_again_gives_up_and_everyone_is_told() -> None:
    model = Watched()

    def always(tokens: mx.array) -> None:
        raise RuntimeError("made to fail")

    model.before = always

    async def main() -> None:
        async with engine(loaded("watched", model), max_batch=1) as running:
            ends = await asyncio.gather(
                *(Running(running, job(PROMPT, 5)).result() for _ in range(5)), return_exceptions=True
            )
            assert all(isinstance(end, EngineFailed) for end in ends)
            closed = await asyncio.wait_for(running.closed, 10)
            assert closed.failure is not None
            with pytest.raises(EngineFailed):
                Running(running, job(PROMPT, 5))

    asyncio.run(main())


# -- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("why", "error"), [("shutdown", ShuttingDown), ("unloaded", Cancelled)])
def test_closing_ends_every_request_with_the_reason(why: Any, error: type[Exception]) -> None:
    async def main() -> list[Any]:
        async with engine(loaded("llama"), max_batch=1) as running:
            row = Running(running, job(PROMPT, 400, stream=True))
            queued = Running(running, job(PROMPT, 5))
            await row.first_token()
            running.close(Close(why))
            return await asyncio.gather(row.result(), queued.result(), return_exceptions=True)

    assert [type(end) for end in asyncio.run(main())] == [error, error]


def test_a_prompt_that_is_still_being_read_ends_with_its_engine() -> None:
    async def main() -> None:
        async with engine(loaded("llama")) as running:
            reading = asyncio.ensure_future(running.token_ids(TextPrompt("word " * 400_000)))
            await asyncio.sleep(0)
            running.close(Close("unloaded"))
            with pytest.raises(Cancelled, match="model unloaded"):
                await reading
            with pytest.raises(Cancelled, match="model unloaded"):
                await running.token_ids(TextPrompt("word"))
            with pytest.raises(Cancelled, match="model unloaded"):
                Running(running, job(PROMPT))

    asyncio.run(main())


def test_engines_that_follow_each_other_use_one_thread() -> None:
    before = threading.active_count()
    with ThreadPoolExecutor(8, thread_name_prefix="engine") as threads:

        async def main() -> set[str]:
            names = set()
            for _ in range(4):
                running = Engine(loaded("llama"), SchedulerLimits(), threads=threads)
                await Running(running, job(PROMPT, 2)).result()
                names |= {thread.name for thread in threading.enumerate() if thread.name.startswith("engine")}
                running.close(Close("unloaded"))
                await asyncio.wait_for(running.closed, 30)
            return names

        assert asyncio.run(main()) == {"engine-llama"}
    assert threading.active_count() <= before


def test_ended_requests_and_closed_engines_hold_no_memory() -> None:
    async def main() -> int:
        async with engine(loaded("llama")) as running:
            for round in range(30):
                each = Running(running, job([round + 1] * 40, 30, stream=True))
                if round % 2:
                    await each.first_token()
                    each.stream.cancel()
                await asyncio.wait([asyncio.ensure_future(each.result())])
            await Running(running, job(PROMPT, 1)).result()
            gc.collect()
            return sum(isinstance(thing, Request) for thing in gc.get_objects())

    gc.collect()
    before = mx.get_active_memory()
    assert asyncio.run(main()) <= 1
    gc.collect()
    assert mx.get_active_memory() - before < 2**20
