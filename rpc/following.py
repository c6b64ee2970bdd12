"""The subscriptions of one connection: their events, sent one after the other for as long as the connection lasts.

Owned by the connection, on the event loop. Nothing is stored here: an event is taken from its subscription when the
socket has taken the one before, and what a slow client does not take is dropped, and counted, there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

import anyio
from anyio.abc import TaskGroup

from omlxd.engine.api import Subscription
from omlxd.rpc.wire import event_notification

MAX_SUBSCRIPTIONS: Final = 16


class Following:
    """Entered with the connection. Whoever stops reading requests gets no events either, from when all is answered."""

    def __init__(self, notify: Callable[[bytes], Awaitable[None]]) -> None:
        self._notify = notify
        self._subscriptions: list[Subscription] = []
        self._new: list[Subscription] = []
        self._tasks: TaskGroup = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for subscription in self._subscriptions:
            subscription.close()
        self._tasks.cancel_scope.cancel()  # a send to a client that does not read would never end
        await self._tasks.__aexit__(kind, exc, tb)

    def add(self, subscription: Subscription) -> str | None:
        """Takes a subscription over; its events wait until `begin`. Returns why not, if it does not."""
        if len(self._subscriptions) == MAX_SUBSCRIPTIONS:
            return f"this connection has {MAX_SUBSCRIPTIONS} subscriptions, the most; name all topics in one of them"
        self._subscriptions.append(subscription)
        self._new.append(subscription)
        return None

    def begin(self) -> None:
        """The client has the ids of all subscriptions; called after each answer, for most of which none is new."""
        for subscription in self._new:
            self._tasks.start_soon(self._forward, subscription)
        self._new.clear()

    async def _forward(self, subscription: Subscription) -> None:
        async for event, dropped in subscription:
            await self._notify(event_notification(subscription.id, event, dropped))
