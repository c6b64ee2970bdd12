"""What an engine tells: its requests' events, and what others may read of it at any time.

Owned by the engine thread. Events are handed over to the event loop once per step; snapshots are values, replaced as a
whole, at most `SNAPSHOT_S` old and never made so often that a long line slows the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from omlxd.engine.api import ModelMetrics, Progress, RequestInfo
from omlxd.engine.metrics import Meter
from omlxd.engine.request import Clock, Request
from omlxd.engine.stream import Event

SNAPSHOT_S = 0.1  # how old what is published may be
SNAPSHOT_PAUSE = 20  # times what one took, until the next: a long line is not described at every step

Events = Sequence[tuple[str, Event]]
Emit = Callable[[Events], None]


class Reports:
    """`requests` and `metrics` may be read on any thread."""

    def __init__(self, emit: Emit, meter: Meter, clock: Clock, live: Callable[[], Iterable[Request]]) -> None:
        self._emit = emit
        self._live = live
        self._meter = meter
        self._clock = clock
        self._events: list[tuple[str, Event]] = []
        self._published = self._publish_from = clock()
        self._has_news = False  # a request has come or gone since what is published
        self.requests: tuple[RequestInfo, ...] = ()
        self.metrics: ModelMetrics = meter.read()

    def say(self, request: Request, event: Event) -> None:
        self._events.append((request.id, event))

    def ended(self, request: Request, event: Event) -> None:
        self._meter.ended(request, event)
        self._has_news = True
        self.say(request, event)

    def waits(self, request: Request) -> None:
        if request.job.progress:
            self.say(request, Progress("held", request.computed, len(request.job.prompt), request.reason))

    def computed(self, request: Request, num_tokens: int) -> None:
        """So much of the request's prompt has been computed."""
        request.computed = num_tokens
        if request.job.progress:
            self.say(request, Progress("prefill", num_tokens, len(request.job.prompt)))

    def tell(self, *, now: bool = False) -> None:
        """Hands over what has happened since the last time. Whoever is told of an end finds it counted."""
        self.publish(now=now)
        if self._events:
            events, self._events = self._events, []
            self._emit(events)

    def publish(self, *, now: bool = False) -> None:
        """Makes the snapshots anew, if it is time."""
        began = self._clock()
        due = self._has_news or began - self._published >= SNAPSHOT_S
        if not now and (not due or began < self._publish_from):
            return
        self._has_news = False
        self.metrics = self._meter.read()
        self.requests = tuple(request.info() for request in self._live())
        self._published = self._clock()
        self._publish_from = self._published + SNAPSHOT_PAUSE * (self._published - began)
