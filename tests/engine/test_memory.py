"""An engine under a memory limit: refused before it runs, held until there is room, preempted without loss."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from omlxd.engine.api import Cancelled, MemoryExceeded
from omlxd.engine.engine import Engine
from omlxd.engine.estimator import Costs
from omlxd.engine.guard import Helpers, MemoryGuard
from omlxd.engine.inbox import Close, Preempt, Refuse
from omlxd.engine.kv_cost import kv_cost
from omlxd.engine.ledger import Ledger, Reservation
from omlxd.engine.limits import Ceilings, Level, Orders, judge
from omlxd.engine.memory import ASK_AHEAD_TOKENS, GROWTH_TOKENS, PATIENCE_S, WAITS_FOR_MEMORY, WorkMemory
from omlxd.engine.model import LoadedModel
from omlxd.engine.request import Clock, Request
from omlxd.engine.scheduler import SchedulerLimits
from omlxd.engine.widths import widths
from tests.e2e.heavy import CONTEXT, WIDE
from tests.engine.running import Running, assert_is_the_cold_run, cached, job, loaded, tokenizer
from tests.engine.test_guard import limits
from tests.engine.watched import Watched
from tests.models import MODELS, VOCABULARY, build

KV = 512  # bytes of a token's cache in the tiny llama: two layers, K and V, two heads of 16, fp32
STEP = 256 * KV
PROMPT = [token % 250 for token in range(3, 203)]


def filled() -> list[KVCache]:
    """Every cache with arrays that is alive, other tests' among them."""
    return [each for each in gc.get_objects() if type(each) is KVCache and each.keys is not None]


def weighed(model: LoadedModel) -> LoadedModel:
    """With what its work costs, as the backend hands it over."""
    wide = widths(MODELS["llama"].config, vocabulary=VOCABULARY, item_bytes=4, gpu=False)
    return replace(model, costs=Costs(kv_cost(build("llama")), wide))


@asynccontextmanager
async def engine(
    model: LoadedModel, guard: MemoryGuard, clock: Clock = time.monotonic, **options: Any
) -> AsyncIterator[Engine]:
    running = Engine(weighed(model), SchedulerLimits(**options), clock, guard)
    try:
        yield running
    finally:
        running.close(Close("unloaded"))
        await asyncio.wait_for(running.closed, 30)
        guard.ledger.check()
        assert guard.ledger.total() == 0


async def held(running: Engine, id: str) -> None:
    """Returns when the request waits for memory."""
    while not any(info.id == id and info.reason == WAITS_FOR_MEMORY for info in running.requests):
        await asyncio.sleep(0.01)


def under(soft: int, **orders: Any) -> MemoryGuard:
    guard = MemoryGuard(limits=limits(soft))
    guard.limits = replace(guard.limits, orders=Orders(**orders))
    return guard


def test_what_can_never_fit_is_refused_with_its_numbers_before_any_forward_pass() -> None:
    """MM-07."""

    async def main() -> None:
        model = Watched()
        async with engine(loaded("llama", model), under(10 * STEP)) as running:
            with pytest.raises(MemoryExceeded, match="shorten it") as caught:
                await Running(running, job(PROMPT, 10_000)).result()
            assert caught.value.fields["limit_bytes"] == 10 * STEP
            assert int(str(caught.value.fields["needed_bytes"])) > 10_200 * KV
            assert model.calls == []
            assert len((await Running(running, job([5], 4)).result()).token_ids) == 4

    asyncio.run(main())


def test_requests_that_do_not_fit_together_take_turns_and_answer_as_if_alone() -> None:
    """Each needs two steps of cache, and as much again while it joins: there is room for one."""

    async def main() -> None:
        model, guard = build("llama"), under(11 * STEP)
        async with engine(loaded("llama", model), guard) as running:
            jobs = [Running(running, job([n, *PROMPT], 60, logprobs=20)) for n in range(5)]
            for each in jobs:
                assert_is_the_cold_run(model, await each.result())

    asyncio.run(main())


def test_who_waits_for_memory_says_so_and_goes_on_when_the_pressure_has_passed() -> None:
    async def main() -> None:
        guard = under(1 << 40, admits=False)
        async with engine(loaded("llama"), guard) as running:
            waiting = Running(running, job(PROMPT, 4))
            await held(running, waiting.job.id)
            guard.limits = limits(1 << 40)
            assert len((await waiting.result()).token_ids) == 4

    asyncio.run(main())


def test_who_waits_has_stored_prefixes_dropped_for_it() -> None:
    async def main() -> None:
        guard, hot = under(9 * STEP), [9 * STEP]
        guard.ledger.watch("hot tier", "hot", lambda: hot[0])

        def shrink(nbytes: int) -> None:
            hot[0] = max(0, hot[0] - nbytes)

        guard.helped_by(Helpers(shrink_cache=shrink))
        running = Engine(weighed(loaded("llama")), SchedulerLimits(), time.monotonic, guard)
        assert len((await Running(running, job(PROMPT, 4)).result()).token_ids) == 4
        assert hot[0] < 9 * STEP
        running.close(Close("unloaded"))
        await asyncio.wait_for(running.closed, 30)

    asyncio.run(main())


def test_pressure_without_end_ends_the_wait_with_a_typed_error_and_spares_the_one_that_runs() -> None:
    """MM-17: the reading stays above the hard mark, for what others use; one request decodes, one waits."""

    async def main() -> None:
        guard, later = under(1 << 40), [0.0]
        model = Watched()
        model.slow(0.01)
        async with engine(loaded("llama", model), guard, lambda: time.monotonic() + later[0]) as running:
            busy = Running(running, job([5], 300, stream=True))
            await busy.first_token()
            guard.limits = judge(
                Ceilings(4 << 40, 1 << 40),
                tier="safe",
                measured=2 << 40,
                ledger=guard.ledger.total(),
                before=Level.OK,
                orders=Orders(0.25, False, exhausted=True),
            )
            waiting = Running(running, job([6], 4))
            await held(running, waiting.job.id)
            later[0] += PATIENCE_S
            with pytest.raises(MemoryExceeded, match="try again later"):
                await waiting.result()
            model.slow(0)
            assert len((await busy.result()).token_ids) == 300

    asyncio.run(main())


def test_a_wait_with_nothing_left_to_wait_for_ends_too() -> None:
    async def main() -> None:
        guard, later = under(1 << 40), [0.0]
        guard.limits = judge(Ceilings(1 << 40, 1000), tier="safe", measured=950, ledger=0, before=Level.OK)
        async with engine(loaded("llama"), guard, lambda: time.monotonic() + later[0]) as running:
            waiting = Running(running, job(PROMPT, 4))
            await held(running, waiting.job.id)
            later[0] += PATIENCE_S
            with pytest.raises(MemoryExceeded) as caught:
                await waiting.result()
            assert caught.value.fields["binding"] == "dynamic"

    asyncio.run(main())


def test_turns_shrink_as_the_ladder_says() -> None:
    async def main() -> None:
        model = Watched()
        async with engine(loaded("llama", model), under(1 << 40, chunk_share=0.25), prefill_chunk=64) as running:
            await Running(running, job(PROMPT, 2)).result()
            assert max(tokens for _, tokens in model.calls) == 16

    asyncio.run(main())


def test_turns_shrink_to_the_room_that_is_left_below_the_hard_mark() -> None:
    memory = WorkMemory("m", under(1 << 40), weighed(loaded("llama")).costs, lambda: 0.0, merges_rows=True)
    plain = SchedulerLimits(prefill_chunk=512)
    assert memory.turn_limits(plain, []) is plain
    tight = WorkMemory("m", under(2_000_000), weighed(loaded("llama")).costs, lambda: 0.0, merges_rows=True)
    assert 16 <= tight.turn_limits(plain, []).prefill_chunk < 512


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_request_that_is_preempted_for_memory_loses_nothing(has_cache: bool) -> None:
    async def main() -> None:
        model, guard = build("llama"), under(1 << 40)
        watched = Watched(model)
        watched.slow(0.005)
        ready = cached("llama", watched) if has_cache else loaded("llama", watched)
        async with engine(ready, guard) as running:
            first = Running(running, job(PROMPT, 60, logprobs=20, stream=True))
            await first.first_token()
            guard.limits = replace(guard.limits, orders=Orders(admits=False))
            running.relieve(Preempt(first.job.id, "memory is short"))
            await held(running, first.job.id)
            while guard.ledger.held(["kv"]):
                await asyncio.sleep(0.01)
            guard.limits = limits(1 << 40)
            assert_is_the_cold_run(model, await first.result())

    asyncio.run(main())


def test_a_request_that_is_ended_for_memory_gets_its_error_and_no_other_does() -> None:
    async def main() -> None:
        model = build("llama")
        async with engine(loaded("llama", model), under(1 << 40)) as running:
            victim, other = Running(running, job(PROMPT, 400)), Running(running, job([7, 8], 40))
            error = MemoryExceeded("it", needed_bytes=2, limit_bytes=1, binding="static", advice="wait")
            running.relieve(Refuse(victim.job.id, error))
            running.relieve(Refuse("unknown", error))
            with pytest.raises(MemoryExceeded):
                await victim.result()
            assert_is_the_cold_run(model, await other.result())

    asyncio.run(main())


# -- what is reserved -------------------------------------------------------------------------------------------------


def settle(memory: WorkMemory) -> None:
    for _ in range(3):
        memory.step_over(at_rest=False)


def request(tokens: int, max_tokens: int) -> Request:
    return Request(job([1] * tokens, max_tokens), tokenizer(), lambda: 0.0)


def test_a_request_reserves_its_tokens_and_some_to_come_and_more_as_it_grows() -> None:
    guard = under(1 << 40)
    memory = WorkMemory("m", guard, weighed(loaded("llama")).costs, lambda: 0.0, merges_rows=False)
    one = request(100, 2000)
    assert memory.admit(one)
    assert guard.ledger.held(["kv"]) == 2 * STEP  # 100 + 256 tokens
    one.drawn.extend([1] * (GROWTH_TOKENS - ASK_AHEAD_TOKENS))
    assert memory.grow(one)
    assert guard.ledger.held(["kv"]) == 2 * STEP
    one.drawn.append(1)
    assert memory.grow(one)
    assert guard.ledger.held(["kv"]) == 3 * STEP  # 356 + 256 tokens, asked for before the 356 are there


def test_an_answer_that_ends_within_what_it_has_reserves_no_more() -> None:
    guard = under(1 << 40)
    memory = WorkMemory("m", guard, weighed(loaded("llama")).costs, lambda: 0.0, merges_rows=False)
    one = request(100, 256)
    assert memory.admit(one)
    one.drawn.extend([1] * 255)
    assert memory.grow(one)
    assert guard.ledger.held(["kv"]) == 2 * STEP


def test_what_has_left_stays_in_the_books_until_the_steps_under_way_are_over() -> None:
    """The next step cuts the batch; that it has done so is known at the end of the one after it."""
    guard = under(1 << 40)
    memory = WorkMemory("m", guard, weighed(loaded("llama")).costs, lambda: 0.0, merges_rows=False)
    one, other = request(100, 100), request(100, 100)
    assert memory.admit(one)
    assert memory.admit(other)
    memory.leave(one)
    for _ in range(2):
        memory.step_over(at_rest=False)
        assert guard.ledger.held(["kv"]) == 4 * STEP
    memory.step_over(at_rest=False)
    assert guard.ledger.held(["kv"]) == 2 * STEP
    memory.leave(other)
    memory.step_over(at_rest=True)  # nothing is under way any more
    assert guard.ledger.total() == 0


def test_rows_of_one_batch_reserve_what_they_are_padded_to_and_the_copies_of_joining() -> None:
    guard = under(1 << 40)
    memory = WorkMemory("m", guard, weighed(loaded("llama")).costs, lambda: 0.0, merges_rows=True)
    short, long = request(100, 100), request(1000, 24)
    assert memory.admit(short)
    assert memory.admit(long)
    assert guard.ledger.held(["kv"]) == 2 * STEP + 5 * STEP
    # padded by three steps; the longer one joins; the batch of ten is copied, a layer of two at a time, twice
    assert guard.ledger.held(["padding"]) == 3 * STEP + 5 * STEP + 2 * 10 * STEP // 2
    memory.joined(short)
    memory.joined(long)
    assert guard.ledger.held(["padding"]) == 3 * STEP + 5 * STEP + 10 * STEP  # the copies are under way
    settle(memory)
    assert guard.ledger.held(["padding"]) == 3 * STEP + 10 * STEP
    memory.leave(long)
    settle(memory)
    assert guard.ledger.held(["padding"]) == 2 * STEP
    memory.close()
    assert guard.ledger.total() == 0


def test_three_hundred_requests_half_of_them_cancelled_leave_no_array_behind() -> None:
    """MM-09."""

    async def main() -> None:
        guard = under(1 << 40)
        async with engine(loaded("llama"), guard, max_queue=400) as running:
            await Running(running, job([5], 4)).result()
            gc.collect()
            before, others = mx.get_active_memory(), filled()

            async def one(n: int) -> None:
                asked = Running(running, job([n % 250], 64 if n % 2 else 30, stream=True, use_cache=False))
                if n % 2:
                    await asked.first_token()
                    asked.stream.cancel()
                    with pytest.raises(Cancelled):
                        await asked.result()
                else:
                    await asked.result()

            await asyncio.gather(*(one(n) for n in range(300)))
            while running.requests or guard.ledger.total():
                await asyncio.sleep(0.01)
            gc.collect()
            assert mx.get_active_memory() - before <= 2**20
            assert [each for each in filled() if all(each is not other for other in others)] == []

    asyncio.run(main())


@pytest.mark.parametrize("uses_it", [False, True])
def test_nobody_has_the_model_any_more_when_its_engine_has_ended(uses_it: bool) -> None:
    async def main() -> None:
        running = Engine(weighed(cached("llama")), SchedulerLimits(), time.monotonic, under(1 << 40))
        if uses_it:
            await Running(running, job(PROMPT, 4)).result()
        running.close(Close("unloaded"))
        assert (await asyncio.wait_for(running.closed, 30)).remains is None

    asyncio.run(main())


# -- answers that grow ------------------------------------------------------------------------------------------------


class Remembering(Ledger):
    """Knows the most that was ever in it."""

    most = 0

    def _add(self, reservation: Reservation) -> None:
        super()._add(reservation)
        self.most = max(self.most, self.total())


def test_answers_that_outgrow_the_memory_make_way_for_each_other_and_end_as_if_alone() -> None:
    """Three are admitted with two steps of cache each; a third step each is more than there is."""

    async def main() -> None:
        model, guard = build("llama"), MemoryGuard(Remembering(), limits(16 * STEP))
        async with engine(loaded("llama", model), guard) as running:
            jobs = [Running(running, job([n, *PROMPT], 400, logprobs=20, stream=True)) for n in range(3)]
            for each in jobs:
                await each.first_token()
            for each in jobs:
                assert_is_the_cold_run(model, await each.result())
            assert running.metrics.counters["requests_preempted"] > 0
        assert isinstance(guard.ledger, Remembering)
        assert guard.ledger.most <= guard.limits.hard

    asyncio.run(main())


def test_an_answer_that_cannot_grow_for_others_sake_waits_and_then_ends_with_a_typed_error() -> None:
    async def main() -> None:
        guard, later = MemoryGuard(Remembering(), limits(1 << 40)), [0.0]
        async with engine(loaded("llama"), guard, lambda: time.monotonic() + later[0]) as running:
            answer = Running(running, job(PROMPT, 2000, stream=True))
            await answer.first_token()
            other = guard.ledger.hold("another program", "process", 0)
            guard.limits = limits(16 * STEP)
            other.resize(10 * STEP)  # what it has fits beside this, what it will want does not
            await held(running, answer.job.id)
            later[0] += PATIENCE_S
            with pytest.raises(MemoryExceeded, match="after 5 s of waiting"):
                await answer.result()
            other.release()

    asyncio.run(main())


def test_a_wait_is_in_vain_only_from_when_nobody_is_left_who_could_end() -> None:
    """Who has waited for long while others ran has its time when they have ended, whatever the orders still say."""
    now = [0.0]
    guard = under(1 << 40, admits=False)
    memory = WorkMemory("m", guard, weighed(loaded("llama")).costs, lambda: now[0], merges_rows=False)
    other, waiting = guard.ledger.hold("other", "kv", STEP), request(100, 100)
    assert not memory.admit(waiting)
    now[0] = 100.0
    assert memory.lost_patience(waiting) is None
    other.release()
    now[0] += PATIENCE_S - 1
    assert memory.lost_patience(waiting) is None
    guard.limits = limits(1 << 40)
    assert memory.admit(waiting)
    assert memory.lost_patience(waiting) is None


def test_an_answer_may_grow_up_to_the_hard_mark_and_has_others_make_room_first() -> None:
    asked: list[int] = []
    guard = under(4 * STEP)
    guard.helped_by(Helpers(shrink_cache=asked.append))
    memory = WorkMemory("m", guard, weighed(loaded("llama")).costs, lambda: 0.0, merges_rows=False)
    one = request(100, 2000)
    assert memory.admit(one)  # two steps
    other = guard.ledger.hold("other", "kv", STEP + STEP // 2)
    one.drawn.extend([1] * 250)
    assert not memory.grow(one)  # 4.5 steps; the hard mark stands at 4.27
    assert not memory.grow(one)
    assert asked == [STEP // 2]  # once, not at every step
    assert not memory.is_spent(one)
    one.drawn.extend([1] * 5)
    assert memory.is_spent(one)
    other.resize(STEP + STEP // 5)
    assert memory.grow(one)
    assert not memory.is_spent(one)


def test_every_array_is_in_the_books_as_long_as_it_is_there() -> None:
    """At every forward pass what is allocated is at most what is reserved, however rows come and go."""

    async def main() -> None:
        inner = build("llama", context=CONTEXT, **WIDE)
        model = Watched(inner)
        wide = widths({**MODELS["llama"].config, **WIDE}, vocabulary=VOCABULARY, item_bytes=4, gpu=False)
        ready = replace(loaded("llama", model), costs=Costs(kv_cost(inner), wide))
        guard = under(1 << 40)
        mx.eval(inner.parameters())
        gc.collect()
        before = mx.get_active_memory()
        over: list[int] = []
        model.before = lambda tokens: over.append(mx.get_active_memory() - before - guard.ledger.total())
        running = Engine(ready, SchedulerLimits(), time.monotonic, guard)
        answers = [Running(running, job([n, *PROMPT], 4 + 9 * n)) for n in range(4)]
        for each in answers:
            await each.result()
        running.close(Close("unloaded"))
        await asyncio.wait_for(running.closed, 30)
        assert len(over) > 30
        assert max(over) <= 2**20  # what is not the cache's: tokens, logits, sampling

    asyncio.run(main())
