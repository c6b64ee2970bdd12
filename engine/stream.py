"""One request as the event loop sees it: the events its engine sent, merged as long as nobody takes them.

Lives on the event loop only; the engine's handle delivers a step's events here. Nothing blocks and nothing grows
without bound: texts of one channel are joined, and of progress only the newest is kept, so a slow reader holds its own
answer and no more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from omlxd.engine.api import Channel, Delta, GenerationResult, OmlxError, Progress, TokenLogprob

Event = Delta | Progress | GenerationResult | OmlxError


class _Gathering:
    """Deltas of one channel that wait to be taken, joined only then: a long wait costs no more than a short one."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        self._logprobs.extend(delta.logprobs)

    def join(self) -> Delta:
        return Delta("".join(self._texts), self.channel, self._token_ids, self._logprobs)


class EventStream:
    """Implements `engine.api.Generation`. `on_cancel` is called once, when the first cancellation is asked for."""

    def __init__(self, on_cancel: Callable[[str | None], None]) -> None:
        self._on_cancel = on_cancel
        self._pending: deque[_Gathering | Progress] = deque()
        self._wake = asyncio.Event()
        self._end: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()
        # A request whose client has left ends with nobody to look; that is no mistake worth a log line.
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())
        self._cancelled = False

    @property
    def outcome(self) -> str:
        """How it ended, for counting: `finished`, or the error's kind; `running` before the end."""
        if not self._end.done():
            return "running"
        error = self._end.exception()
        return error.kind if isinstance(error, OmlxError) else "finished"

    async def wait_ended(self) -> None:
        """Returns at the end, however it ended."""
        await asyncio.wait([self._end])

    def deliver(self, event: Event) -> None:
        """Takes one event. The first result or error is the end; whatever comes later is dropped."""
        if self._end.done():
            return
        if isinstance(event, GenerationResult):
            self._end.set_result(event)
        elif isinstance(event, OmlxError):
            self._end.set_exception(event)
        elif isinstance(event, Delta):
            self._add_delta(event)
        else:
            self._pending = deque(kept for kept in self._pending if not isinstance(kept, Progress))
            self._pending.append(event)
        self._wake.set()

    def _add_delta(self, delta: Delta) -> None:
        last = self._pending[-1] if self._pending else None
        if not isinstance(last, _Gathering) or last.channel != delta.channel:
            last = _Gathering(delta.channel)
            self._pending.append(last)
        last.add(delta)

    async def __aiter__(self) -> AsyncIterator[Delta | Progress]:
        while True:
            while self._pending:
                event = self._pending.popleft()
                yield event.join() if isinstance(event, _Gathering) else event
            if self._end.done():
                return
            self._wake.clear()
            await self._wake.wait()

    async def result(self) -> GenerationResult:
        # Shielded: one waiter that gives up must not cancel the end for the others.
        return await asyncio.shield(self._end)

    def cancel(self, reason: str | None = None) -> None:
        if not self._cancelled and not self._end.done():
            self._cancelled = True
            self._on_cancel(reason)
