"""Deltas and progress on their way out: one `$/progress` after the other, each written before the next is made.

On the event loop, one per call. Nothing is queued here: a slow reader makes `send` wait, and what comes up meanwhile is
merged by the generation, or, of progress, replaced by the newest.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import TypeVar

import anyio

from omlxd.engine.api import Delta, OmlxError, Progress, ProgressSink
from omlxd.rpc.calls import Call
from omlxd.rpc.wire import Extras, delta_value, notification, notification_head, progress_value

T = TypeVar("T")


class Notifier:
    """Writes one call's notifications under the tokens it gave."""

    def __init__(self, call: Call, extras: Extras) -> None:
        self._send = call.client.notify
        self._delta_head = None if call.delta_token is None else notification_head(call.delta_token)
        self._progress_head = None if call.progress_token is None else notification_head(call.progress_token)
        self._extras = extras
        self._seq = 0

    async def forward(self, events: AsyncIterable[Delta | Progress]) -> None:
        """Sends all of `events` that were asked for; returns when they have ended and the last one is written."""
        async for event in events:
            if isinstance(event, Delta):
                await self.delta(event)
            else:
                await self.progress(event)

    async def delta(self, delta: Delta) -> None:
        if self._delta_head is None:
            return
        value = delta_value(delta, self._seq, self._extras)
        if value is not None:
            self._seq += 1
            await self._send(notification(self._delta_head, value))

    async def progress(self, progress: Progress) -> None:
        if self._progress_head is not None:
            await self._send(notification(self._progress_head, progress_value(progress)))


class _Newest:
    """The newest progress that has not been sent yet; an older one is replaced."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._closed = False
        self._changed = anyio.Event()

    def put(self, progress: Progress) -> None:
        self._progress = progress
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Progress]:
        while True:
            progress, self._progress = self._progress, None
            if progress is not None:
                yield progress
            elif self._closed:
                return
            else:
                self._changed = anyio.Event()
                await self._changed.wait()


async def with_progress(call: Call, work: Callable[[ProgressSink], Awaitable[T]]) -> T:
    """What `work` gives, its progress sent while it runs. Raises what `work` raises, and Cancelled."""
    if call.progress_token is None:
        return await call.wait_for(lambda: work(_ignore))
    newest = _Newest()
    outcome: T | OmlxError
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Notifier(call, Extras()).forward, newest)
        try:
            outcome = await call.wait_for(lambda: work(newest.put))
        except OmlxError as failure:  # through the group it would arrive wrapped
            outcome = failure
        finally:
            newest.close()
    if isinstance(outcome, OmlxError):
        raise outcome
    return outcome


def _ignore(progress: Progress) -> None:
    """Nobody asked."""
