"""Rows that join the batch: how many passes their first tokens cost, and what becomes of those that end with them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import pytest

from omlxd.engine.api import EngineFailed, GenerationResult
from omlxd.engine.batch import InterleavedBatch, MergedBatch
from omlxd.engine.drawing import RowStart, RowToken
from omlxd.engine.joining import ONE_PASS_TOKENS
from omlxd.engine.memory import WorkMemory
from omlxd.engine.prefill import new_caches
from omlxd.engine.request import Request
from omlxd.engine.sampling import SamplerRow
from omlxd.engine.sampling_settings import SamplingSettings
from tests.engine.running import Running, assert_is_the_cold_run, cached, engine, job, loaded
from tests.engine.watched import Watched
from tests.models import MODELS, build, cold_run


def stepped(batch: MergedBatch | InterleavedBatch) -> list[RowToken]:
    tokens = batch.step()
    batch.draw()
    return tokens


def start(model: Any, id: str, tokens: list[int]) -> RowStart:
    return RowStart(id, new_caches(model), tokens, SamplerRow(SamplingSettings(seed=0)), [])


def one_token(model: Watched, length: int) -> list[tuple[int, int]]:
    async def main() -> None:
        async with engine(loaded("watched", model)) as running:
            await Running(running, job([7] * length, 1)).result()

    asyncio.run(main())
    return model.calls


def test_a_short_prompts_first_token_costs_one_pass_and_its_end_none() -> None:
    assert one_token(Watched(), 5) == [(1, 5)]


def test_a_long_ends_last_token_has_a_pass_of_its_own_so_that_logits_are_computed_for_it_alone() -> None:
    for length, passes in ((ONE_PASS_TOKENS, [ONE_PASS_TOKENS]), (ONE_PASS_TOKENS + 1, [ONE_PASS_TOKENS, 1])):
        model = Watched()
        batch = MergedBatch(model, last_apart=False)
        batch.join([start(model, "a", [7] * length)], lambda id, caches, lacking: None)
        assert model.calls == [(1, tokens) for tokens in passes]


def test_a_recurrent_models_checkpoint_is_taken_before_the_last_token() -> None:
    model = cached("lfm2")

    async def main() -> list[int]:
        async with engine(model) as running:
            results = [await Running(running, job([7] * 20, 1)).result() for _ in range(2)]
            return [result.usage.cached_tokens for result in results]

    assert asyncio.run(main()) == [0, 19]


@pytest.mark.parametrize("kind", [MergedBatch, InterleavedBatch])
def test_a_rows_first_token_is_in_no_cache_until_the_next_step(
    kind: type[MergedBatch] | type[InterleavedBatch],
) -> None:
    model = build("llama")
    batch = kind(model, last_apart=False)
    batch.join([start(model, "a", [1, 2, 3]), start(model, "b", [4, 5])], lambda id, caches, lacking: None)
    for id, length in (("a", 3), ("b", 2)):
        caches, lacking = batch.caches(id)
        assert (caches[0].offset, lacking) == (length, 1)
    stepped(batch)
    for id, length in (("a", 3), ("b", 2)):
        caches, lacking = batch.caches(id)
        assert lacking == 0
        assert caches[0].offset >= length + 1


@pytest.mark.parametrize("kind", [MergedBatch, InterleavedBatch])
@pytest.mark.parametrize("leaves", ["a", "b", "c"])
def test_a_row_that_leaves_between_its_first_token_and_its_second_leaves_the_others_alone(
    kind: type[MergedBatch] | type[InterleavedBatch], leaves: str
) -> None:
    model = build("llama")
    prompts = {"a": [1, 2, 3], "b": [4, 5], "c": [6, 7, 8, 9]}
    batch = kind(model, last_apart=False)
    drawn: dict[str, list[int]] = {id: [] for id in prompts}
    for group in (["a"], ["b", "c"]):
        for row in batch.join([start(model, id, prompts[id]) for id in group], lambda id, caches, lacking: None):
            drawn[row.id].append(row.token_id)
    batch.remove(frozenset({leaves}))
    assert stepped(batch) == []  # all of them have told their first tokens, and no other has been computed
    for _ in range(5):
        for row in stepped(batch):
            drawn[row.id].append(row.token_id)
    for id, prompt in prompts.items():
        ids, _ = cold_run(model, prompt, 6)
        assert drawn[id] == (ids[:1] if id == leaves else ids)


def test_a_row_that_joins_runs_with_the_others_in_one_pass() -> None:
    model = Watched()
    batch = MergedBatch(model, last_apart=False)
    drawn: dict[str, list[int]] = {"a": [], "b": []}

    def keep(rows: list[RowToken]) -> list[str]:
        for row in rows:
            drawn[row.id].append(row.token_id)
        return [row.id for row in rows]

    keep(batch.join([start(model, "a", [1, 2, 3])], lambda id, caches, lacking: None))
    assert [keep(stepped(batch)) for _ in range(3)] == [[], ["a"], ["a"]]
    keep(batch.join([start(model, "b", [4, 5])], lambda id, caches, lacking: None))
    model.calls.clear()
    assert [keep(stepped(batch)) for _ in range(3)] == [["a"], ["a", "b"], ["a", "b"]]
    assert model.calls == [(2, 1)] * 3
    for id, prompt in (("a", [1, 2, 3]), ("b", [4, 5])):
        assert drawn[id] == cold_run(model.inner, prompt, len(drawn[id]))[0]


@pytest.mark.parametrize("kind", [MergedBatch, InterleavedBatch])
@pytest.mark.parametrize("layout", ["llama", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("leaves", ["a", "b", "c"])
def test_a_row_that_ends_with_its_token_leaves_before_the_next_is_drawn(
    kind: type[MergedBatch] | type[InterleavedBatch], layout: str, leaves: str
) -> None:
    model = build(layout)
    prompts = {"a": [1, 2, 3], "b": [4, 5], "c": [6, 7, 8, 9]}
    draws: list[str] = []

    def processor(id: str) -> Callable[[mx.array, mx.array], mx.array]:
        def process(newest: mx.array, logits: mx.array) -> mx.array:
            draws.append(id)
            return logits

        return process

    batch = kind(model, last_apart=False)
    rows = [replace(start(model, id, tokens), processors=[processor(id)]) for id, tokens in prompts.items()]
    drawn = {row.id: [row.token_id] for row in batch.join(rows, lambda id, caches, lacking: None)}
    stepped(batch)
    for step in range(4):
        draws.clear()
        for row in batch.step():
            drawn[row.id].append(row.token_id)
        assert draws == []  # what is there is told first
        if step == 1:
            batch.remove(frozenset({leaves}))
        batch.draw()
        assert draws == [id for id in prompts if step < 1 or id != leaves]
    for id, prompt in prompts.items():
        assert drawn[id] == cold_run(model, prompt, 3 if id == leaves else 5)[0]


@pytest.mark.parametrize("layout", [name for name, tiny in MODELS.items() if tiny.batches])
def test_rows_that_enter_one_by_one_are_merged_once_and_go_on_as_alone(layout: str) -> None:
    model = Watched(build(layout))
    batch = MergedBatch(model, last_apart=False)
    prompts = {id: [7 * n % 250 for n in range(1, length)] for id, length in (("a", 40), ("b", 4), ("c", 71), ("d", 9))}
    drawn: dict[str, list[int]] = {id: [] for id in prompts}

    def keep(rows: list[RowToken]) -> None:
        for row in rows:
            drawn[row.id].append(row.token_id)

    for ids in (["a"], ["b", "d"], ["c"]):
        keep(batch.join([start(model.inner, id, prompts[id]) for id in ids], lambda id, caches, lacking: None))
    caches, lacking = batch.caches("c")
    assert (caches is not None, lacking) == (True, 1)
    batch.remove(frozenset({"d"}))
    model.calls.clear()
    for _ in range(5):
        keep(stepped(batch))
    assert model.calls == [(3, 1)] * 5
    for id, prompt in prompts.items():
        assert drawn[id] == cold_run(model.inner, prompt, 1 if id == "d" else 5)[0]


def test_rows_with_much_kv_enter_until_the_others_have_waited_long_enough() -> None:
    model = Watched()
    shared, followers = [3] * 60, 5
    now = 0.0

    def takes_30_ms(_: mx.array) -> None:
        nonlocal now
        now += 0.03  # a second one has ended after 60 ms; a third would after 90

    async def main() -> None:
        async with engine(cached("watched", model), clock=lambda: now, max_decode_stall_ms=80) as running:
            leader = Running(running, job(shared, 60, stream=True))
            await leader.first_token()
            model.before = takes_30_ms
            model.calls.clear()
            rest = [Running(running, job([*shared, 5, n], 2)) for n in range(followers)]
            for each in [leader, *rest]:
                await each.result()

    asyncio.run(main())
    entered = [number for number, (rows, tokens) in enumerate(model.calls) if tokens > 1]
    assert [model.calls[number] for number in entered] == [(1, 2)] * followers
    between = {second - first for first, second in pairwise(entered)}
    assert 1 in between  # several enter in a turn
    assert max(between) > 1  # and then the others decode


def test_who_makes_way_for_a_row_that_enters_before_it_enters_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Watched()
    shared, grown = [3] * 60, WorkMemory.grow
    ids: list[str] = []
    in_turn: list[Request] = []

    def grow(memory: WorkMemory, request: Request) -> bool:
        """There is no memory for the first of them, once: the one that came last leaves."""
        if request.id in ids and not in_turn:
            in_turn.append(request)
            return False
        return grown(memory, request)

    async def main() -> tuple[list[GenerationResult], float]:
        async with engine(cached("watched", model), clock=lambda: 0.0) as running:  # all enter in one turn
            leader = Running(running, job(shared, 60, stream=True))
            await leader.first_token()
            rest = [job([*shared, 5, n], 4) for n in range(5)]
            ids.extend(each.id for each in rest)
            followers = [Running(running, each) for each in rest]
            results = [await each.result() for each in [leader, *followers]]
            return results, running.metrics.counters["requests_preempted"]

    monkeypatch.setattr(WorkMemory, "grow", grow)
    monkeypatch.setattr(WorkMemory, "is_spent", lambda memory, request: False)
    results, preempted = asyncio.run(main())
    assert preempted == 1
    for result in results:
        assert_is_the_cold_run(model.inner, result)


def test_the_last_row_that_leaves_before_its_second_token_leaves_nothing() -> None:
    model = build("llama")
    batch = MergedBatch(model, last_apart=False)
    batch.join([start(model, "a", [1, 2, 3])], lambda id, caches, lacking: None)
    batch.remove(frozenset({"a"}))
    assert stepped(batch) == []
    with pytest.raises(KeyError):
        batch.caches("a")


def test_what_an_answer_of_one_token_computed_is_kept() -> None:
    model = cached("llama")

    async def main() -> None:
        async with engine(model) as running:
            first = await Running(running, job([7, 8, 9, 10], 1)).result()
            longer = await Running(running, job([7, 8, 9, 10, *first.token_ids, 11], 4)).result()
            assert longer.usage.cached_tokens == 4  # the prompt; the token that ended the answer was never run
            assert_is_the_cold_run(model.model, longer)

    asyncio.run(main())


class WatchedInTurns(Watched):
    """One whose rows cannot be merged: each has a cache of its own."""

    def __init__(self) -> None:
        super().__init__(build("llama4"))

    def make_cache(self) -> Any:
        return self.inner.make_cache()


@pytest.mark.parametrize("kind", [Watched, WatchedInTurns])
def test_a_row_that_fails_at_its_first_token_leaves_those_that_join_with_it_alone(kind: type[Watched]) -> None:
    model = kind()
    entered, released = threading.Event(), threading.Event()

    def hold(tokens: mx.array) -> None:
        entered.set()
        released.wait()

    async def main() -> GenerationResult:
        async with engine(loaded("watched", model)) as running:
            model.before = hold
            ahead = Running(running, job([3, 4], 30))
            await asyncio.to_thread(entered.wait)
            fine = Running(running, job([7, 8, 9, 10, 11], 8))  # joins first: it has the fewer tokens left
            broken = SamplingSettings(seed=0, presence_penalty=cast("float", "no number"))
            doomed = Running(running, job([5] * 6, 8, sampling=broken))
            released.set()
            with pytest.raises(EngineFailed):
                await doomed.result()
            assert_is_the_cold_run(model.inner, await ahead.result())
            return await fine.result()

    assert_is_the_cold_run(model.inner, asyncio.run(main()))
