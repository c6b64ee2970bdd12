"""Events on their way to those who asked for them: one hub, and a queue for each subscription.

Lives on the event loop. Whoever makes something happen publishes and goes on; a queue holds at most MAX_WAITING events
and, when its client reads too slowly, drops the oldest and counts them. An event carries names, states and numbers,
never a text that was sent or generated.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection

from omlxd.engine.api import DaemonEvent, Json, Topic

MAX_WAITING = 256


class EventQueue:
    """Implements `engine.api.Subscription`, for one reader."""

    def __init__(self, id: str, topics: Collection[Topic], on_close: Callable[[EventQueue], None]) -> None:
        self.id = id
        self._topics = frozenset(topics)
        self._on_close = on_close
        self._waiting: deque[DaemonEvent] = deque()
        self._dropped = 0
        self._is_closed = False
        self._changed = asyncio.Event()

    def offer(self, event: DaemonEvent) -> None:
        """Takes an event if it is of the subscription's topics. At the bound the oldest makes way and is counted."""
        if event.topic not in self._topics:
            return
        if len(self._waiting) == MAX_WAITING:
            self._waiting.popleft()
            self._dropped += 1
        self._waiting.append(event)
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[tuple[DaemonEvent, int]]:
        while not self._is_closed:
            if self._waiting:
                dropped, self._dropped = self._dropped, 0
                yield self._waiting.popleft(), dropped
            else:
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        """Idempotent; what waits is not delivered any more."""
        if not self._is_closed:
            self._is_closed = True
            self._changed.set()
            self._on_close(self)


class EventHub:
    """Everybody's events."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._ids = itertools.count(1)
        self._queues: set[EventQueue] = set()

    def publish(self, topic: Topic, **fields: Json) -> None:
        if self._queues:
            event = DaemonEvent(topic, self._now(), fields)
            for queue in self._queues:
                queue.offer(event)

    def subscribe(self, topics: Collection[Topic]) -> EventQueue:
        queue = EventQueue(f"s{next(self._ids)}", topics, self._queues.discard)
        self._queues.add(queue)
        return queue
