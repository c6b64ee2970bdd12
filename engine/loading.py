"""One load of one model, shared by everyone who asked for it, on the loader thread.

Lives on the event loop. The load is given up when the last of those who wait has left: the loader thread notices at
its next report of progress.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor

from omlxd.engine.api import LoadOptions, OmlxError, Progress, ProgressSink, Unsupported
from omlxd.engine.catalog import CatalogEntry
from omlxd.engine.model import LoadedModel

Load = Callable[[CatalogEntry, LoadOptions, ProgressSink], LoadedModel]


def check_options(options: LoadOptions) -> None:
    """Raises Unsupported for what PROTOCOL.md has and this version does not do yet."""
    if options.draft is not None:
        raise Unsupported("draft", "models are not paired with a drafter yet; load it without draft")
    if options.kv_bits is not None:
        raise Unsupported("kv_bits", "the KV cache is not quantised yet; load it without kv_bits")


class GivenUp(Exception):
    """Raised on the loader thread when nobody waits for the load any more."""


class Loading:
    """`wait` returns when the load is over, with the model in the pool or given up, or raises why it failed."""

    def __init__(self) -> None:
        self._given_up = threading.Event()
        self._sinks: list[ProgressSink] = []
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._done.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def run(self, loader: Executor, load: Load, entry: CatalogEntry, options: LoadOptions) -> LoadedModel:
        """Loads on `loader`. Raises what `load` raises, GivenUp among it."""
        return await self._loop.run_in_executor(loader, load, entry, options, self._report)

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
        for sink in self._sinks:
            sink(progress)
