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

    __slots__ = ("_logprobs", "_texts", "_token_ids", "channel")

    def __init__(self, first: Delta) -> None:
        self.channel: Channel = first.channel
        self._texts: list[str] = [first.text]
        self._token_ids: list[int] = [*first.token_ids]
        self._logprobs: list[TokenLogprob] = [*first.logprobs]

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
        self._pending: deque[Delta | _Gathering | Progress] = deque()
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None  # what the reader waits for, while it does
        self._end: asyncio.Future[GenerationResult] = self._loop.create_future()
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
        if isinstance(event, Delta):
            self._add_delta(event)
        elif isinstance(event, GenerationResult):
            self._end.set_result(event)
        elif isinstance(event, OmlxError):
            self._end.set_exception(event)
        else:
            self._pending = deque(kept for kept in self._pending if not isinstance(kept, Progress))
            self._pending.append(event)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _add_delta(self, delta: Delta) -> None:
        last = self._pending[-1] if self._pending else None
        if last is None or isinstance(last, Progress) or last.channel != delta.channel:
            self._pending.append(delta)  # a reader that keeps up gets it as it is
            return
        if isinstance(last, Delta):
            last = self._pending[-1] = _Gathering(last)
        last.add(delta)

    async def __aiter__(self) -> AsyncIterator[Delta | Progress]:
        while True:
            while self._pending:
                event = self._pending.popleft()
                yield event.join() if isinstance(event, _Gathering) else event
            if self._end.done():
                return
            self._news = self._loop.create_future()
            await self._news

    async def result(self) -> GenerationResult:
        # Shielded: one waiter that gives up must not cancel the end for the others.
        return await asyncio.shield(self._end)

    def cancel(self, reason: str | None = None) -> None:
        if not self._cancelled and not self._end.done():
            self._cancelled = True
            self._on_cancel(reason)
