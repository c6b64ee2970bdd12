"""A load is given up when nothing is heard of it for too long, and for no other silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from omlxd.engine.api import Progress
from omlxd.engine.loading import OVERSLEPT_S, GivenUp, Loading, Stalled

STALLED_S = 100.0
Report = Callable[[Progress], None]


class HandLoop(asyncio.SelectorEventLoop):
    """A loop whose clock is moved by hand."""

    moved_s = 0.0

    def time(self) -> float:
        return super().time() + self.moved_s


class Thread(Executor):
    """A loader thread that does what the test says, when the test says so."""

    def __init__(self) -> None:
        self.work: Callable[[], Any] = lambda: None
        self.done: Future[Any] = Future()

    def submit(self, work: Callable[..., Any], /, *args: Any, **others: Any) -> Future[Any]:
        self.work = lambda: work(*args, **others)
        return self.done


def run(test: Callable[[HandLoop, Loading, Thread], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HandLoop)
        await test(loop, Loading(STALLED_S), Thread())

    with asyncio.Runner(loop_factory=HandLoop) as runner:
        runner.run(main())


async def pass_by(loop: HandLoop, seconds: float) -> None:
    """The clock moves, and everyone who waits for it looks."""
    loop.moved_s += seconds
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_load_that_is_silent_for_too_long_is_stalled_and_its_thread_told() -> None:
    async def test(loop: HandLoop, loading: Loading, thread: Thread) -> None:
        reports: list[Report] = []
        load = asyncio.ensure_future(loading.run(thread, reports.append))
        await pass_by(loop, 0)
        thread.work()  # it begins, and is not done yet
        await pass_by(loop, 0)
        await pass_by(loop, STALLED_S - 1)
        assert not load.done()
        await pass_by(loop, 1)
        with pytest.raises(Stalled):
            await load
        with pytest.raises(GivenUp):
            reports[0](Progress("load"))

    run(test)


def test_every_report_begins_the_silence_anew() -> None:
    async def test(loop: HandLoop, loading: Loading, thread: Thread) -> None:
        reports: list[Report] = []
        load = asyncio.ensure_future(loading.run(thread, reports.append))
        await pass_by(loop, 0)
        thread.work()
        await pass_by(loop, 0)
        for _ in range(3):
            await pass_by(loop, STALLED_S - 1)
            reports[0](Progress("load"))
        await pass_by(loop, STALLED_S - 1)
        assert not load.done()
        thread.done.set_result("a model")
        assert await load == "a model"

    run(test)


def test_a_load_that_waits_behind_another_is_not_silent() -> None:
    async def test(loop: HandLoop, loading: Loading, thread: Thread) -> None:
        loading.tell(Progress("held"))  # it waited for room before
        load = asyncio.ensure_future(loading.run(thread, lambda report: None))
        for _ in range(3):
            await pass_by(loop, STALLED_S)
        assert not load.done()
        thread.done.set_result(None)
        await load

    run(test)


def test_a_process_that_was_stopped_holds_nobody_to_have_been_silent() -> None:
    async def test(loop: HandLoop, loading: Loading, thread: Thread) -> None:
        load = asyncio.ensure_future(loading.run(thread, lambda report: None))
        await pass_by(loop, 0)
        thread.work()
        await pass_by(loop, 0)
        await pass_by(loop, STALLED_S + OVERSLEPT_S + 1)
        assert not load.done()
        await pass_by(loop, STALLED_S)
        with pytest.raises(Stalled):
            await load

    run(test)
