"""Pulls under way: each on a thread of its own, given up when nobody waits for it or when the daemon ends.

Lives on the event loop. The threads are few and their own: a download may take hours, and the loop's other worker
threads are for work that does not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

import anyio

from omlxd.engine.api import Cancelled, Progress, ProgressSink, ShuttingDown

MAX_PULLS: Final = 4  # at once; more wait for their turn
LET_GO_S: Final = 3.0  # for a pull that was given up: it looks ten times a second, and then tidies


class Pull(Protocol):
    """`engine.pull.pull`: fetches a model, and returns its folder."""

    def __call__(
        self, source: str, name: str | None, *, models_dir: Path, progress: ProgressSink, cancelled: Callable[[], bool]
    ) -> Path: ...


class Pulls:
    """All pulls that have not ended."""

    def __init__(self, pull: Pull, models_dir: Path) -> None:
        self._pull = pull
        self._models_dir = models_dir
        self._threads = ThreadPoolExecutor(MAX_PULLS, thread_name_prefix="pull")
        self._running: dict[asyncio.Future[Path], threading.Event] = {}
        self._closing = False

    async def run(self, source: str, name: str | None, progress: ProgressSink) -> Path:
        """The folder of the pulled model. Raises what `pull` raises, and ShuttingDown when the daemon ends first.

        Cancelled, it returns when the pull has let go, so that the same model can be asked for again at once.
        """
        loop = asyncio.get_running_loop()
        given_up = threading.Event()

        def report(at: Progress) -> None:
            loop.call_soon_threadsafe(progress, at)

        def work() -> Path:
            return self._pull(source, name, models_dir=self._models_dir, progress=report, cancelled=given_up.is_set)

        if self._closing:
            raise ShuttingDown
        job = self._threads.submit(work)
        ended = asyncio.wrap_future(job)
        self._running[ended] = given_up
        ended.add_done_callback(self._forget)
        try:
            return await asyncio.shield(ended)
        except Cancelled:
            if self._closing:
                raise ShuttingDown from None
            raise
        finally:
            given_up.set()
            if not job.cancel():  # it has begun
                with anyio.move_on_after(LET_GO_S, shield=True):
                    await asyncio.wait([ended])

    async def close(self) -> None:
        """Gives every pull up; those who wait get ShuttingDown. Returns when all have let go, or after LET_GO_S."""
        self._closing = True
        running = dict(self._running)
        for given_up in running.values():
            given_up.set()
        if running:
            await asyncio.wait(running, timeout=LET_GO_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self, ended: asyncio.Future[Path]) -> None:
        del self._running[ended]
        if not ended.cancelled():
            ended.exception()  # looked at, in case that nobody waits any more
