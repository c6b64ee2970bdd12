"""One load of one model, shared by everyone who asked for it, on the loader thread.

Lives on the event loop. The load is given up when the last of those who wait has left: the loader thread notices at
its next report of progress. One that reports nothing for too long is stalled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from omlxd.engine.api import LoadOptions, OmlxError, Progress, ProgressSink, Unsupported

T = TypeVar("T")

OVERSLEPT_S = 1.0  # a wait that is so much too long was the whole process's, stopped or asleep


def check_options(options: LoadOptions) -> None:
    """Raises Unsupported for what PROTOCOL.md has and this version does not do yet."""
    if options.draft is not None:
        raise Unsupported("draft", "models are not paired with a drafter yet; load it without draft")
    if options.kv_bits is not None:
        raise Unsupported("kv_bits", "the KV cache is not quantised yet; load it without kv_bits")


class GivenUp(Exception):
    """Raised on the loader thread when nobody waits for the load any more."""


class Stalled(Exception):
    """The load has not answered for too long; `work` is what still runs."""

    def __init__(self, work: asyncio.Future[Any]) -> None:
        super().__init__()
        self.work = work


class Loading:
    """`wait` returns when the load is over, with the model in the pool or given up, or raises why it failed."""

    def __init__(self, stalled_s: float) -> None:
        self._stalled_s = stalled_s
        self._given_up = threading.Event()
        self._sinks: list[ProgressSink] = []
        self._heard_at: float | None = None  # on the loop's clock; None until the thread has begun with it
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._done.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def run(self, loader: Executor, load: Callable[[ProgressSink], T]) -> T:
        """Loads on `loader`, which may be busy with others before. Raises what `load` raises, GivenUp too; Stalled."""
        self._heard_at = None
        work = self._loop.run_in_executor(loader, self._work, load)
        while not work.done():
            due = self._due()
            await asyncio.wait([work], timeout=due - self._loop.time())
            self._end_if_silent(work, due)
        return work.result()

    def _due(self) -> float:
        return (self._loop.time() if self._heard_at is None else self._heard_at) + self._stalled_s

    def _end_if_silent(self, work: asyncio.Future[T], due: float) -> None:
        now = self._loop.time()
        if work.done() or self._heard_at is None or now < self._due():
            return
        if now > due + OVERSLEPT_S:
            self._hear()
            return
        self.give_up()
        raise Stalled(work)

    def _work(self, load: Callable[[ProgressSink], T]) -> T:  # on the loader thread
        self._loop.call_soon_threadsafe(self._hear)
        return load(self._report)

    def _hear(self) -> None:
        self._heard_at = self._loop.time()

    async def wait(self, sink: ProgressSink) -> None:
        """Waits for the end; whoever stops waiting last gives the load up."""
        self._sinks.append(sink)
        try:
            await asyncio.shield(self._done)
        finally:
            self._sinks.remove(sink)
            if not self._sinks:
                self._given_up.set()

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits, or has yet to learn that the waiting is over."""
        return bool(self._sinks)

    def check(self) -> None:
        """Raises GivenUp when nobody waits any more."""
        if self._given_up.is_set():
            raise GivenUp

    def give_up(self) -> None:
        self._given_up.set()

    def succeed(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def fail(self, error: OmlxError) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    def _report(self, progress: Progress) -> None:  # on the loader thread
        self.check()
        self._loop.call_soon_threadsafe(self.tell, progress)

    def tell(self, progress: Progress) -> None:
        """Tells everyone who waits how far the load has come."""
        self._hear()
        for sink in self._sinks:
            sink(progress)
