"""Admitting: from the line to a prompt under way.

Owned by the engine thread; a part of its step. Looks at the first ones in the line and gives each what it can have now:
a fetch of its prefix from disk, a place behind another prompt that computes the same prefix, or a prompt of its own, if
there is a row and memory for it. Whoever can have none of them lets later ones pass. What is decided about rows is
decided in `scheduler`.
"""

from __future__ import annotations

from omlxd.engine.api import QueueFull
from omlxd.engine.leaving import Leaving
from omlxd.engine.memory import WAITS_FOR_MEMORY, WorkMemory
from omlxd.engine.metrics import Meter
from omlxd.engine.places import Places
from omlxd.engine.prefixes import Prefixes
from omlxd.engine.reporting import Reports
from omlxd.engine.request import Clock, Request, State
from omlxd.engine.scheduler import Row, SchedulerLimits, admission

OVERDUE_S = 1.0  # how often the line is looked through for those who have waited too long
OVERDUE_RETRY_MS = 60_000  # for them: whoever waits an hour waits for more than one request to end
# How many of the line's first are looked at for a free row beyond the rows themselves: held ones make way for others.
LOOKAHEAD = 8
PASSED_BY_S = 2.0  # how long those who need less memory may go before one who waits for it


class Admitting:
    """One engine's door."""

    def __init__(
        self,
        limits: SchedulerLimits,
        places: Places,
        prefixes: Prefixes,
        memory: WorkMemory,
        leaving: Leaving,
        meter: Meter,
        reports: Reports,
        clock: Clock,
    ) -> None:
        self._limits = limits
        self._places = places
        self._line = places.line
        self._fetching = places.fetching
        self._following = places.following
        self._prefixes = prefixes
        self._memory = memory
        self._leaving = leaving
        self._meter = meter
        self._reports = reports
        self._clock = clock
        self._looked_through = clock()

    def step(self) -> None:
        """Lets in whoever can have a place now."""
        self._line.release([hold for hold in self._line.holds if self._following.over(hold)])
        self._end_overdue()
        self._take_fetched()
        if self._line:
            with self._prefixes.sharing():
                self._admit()

    def _admit(self) -> None:
        began = self._clock()
        rows = [Row(request.id, self._line.defers(request)) for request in self._places.taken]
        decided = admission(rows, self._limits, interactive_waits=self._line.interactive_waits)
        free = decided.free
        for request in self._line.head(free + LOOKAHEAD if free else 0):
            if not free:
                break
            if decided.preempt is not None and self._line.defers(request):
                continue  # nobody is preempted for one who would be next
            if self._fetching.begin(request):
                self._line.remove(request)
                request.enter(State.FETCHING, "its prefix is read from disk")
                free -= 1
                continue
            if self._follows(request):
                continue
            if not self._has_memory(request):
                if self._clock() - request.waits_since > PASSED_BY_S:
                    break  # nobody passes any more, or one who needs much would wait for ever
                continue
            if decided.preempt is not None:
                self._leaving.preempt(decided.preempt, "preempted by an interactive request")
            self._begin(request)
            free -= 1
            if self._places.rows and self._clock() - began >= self._limits.max_decode_stall_ms / 1e3:
                break  # long prefixes take their time to be restored: the others' are in the next steps

    def _follows(self, request: Request) -> bool:
        """Whether the request is to wait for another's prompt, which computes the same prefix."""
        hold = self._following.hold_for(request, self._prefixes.would_reuse)
        if hold is None:
            return False
        self._line.hold(hold)
        self._prefixes.stop_at(hold.leader, hold.until)
        self._meter.held()
        self._reports.waits(request)
        return True

    def _has_memory(self, request: Request) -> bool:
        if self._memory.admit(request):
            return True
        in_vain = self._memory.lost_patience(request)
        if in_vain is not None:
            self._leaving.end(request, State.FAILED, in_vain)
        elif request.reason != WAITS_FOR_MEMORY:
            request.enter(State.HELD, WAITS_FOR_MEMORY)
            request.enter(State.QUEUED, WAITS_FOR_MEMORY)
            self._meter.held()
            self._reports.waits(request)
        return False

    def _begin(self, request: Request) -> None:
        self._places.concerned = [request]
        self._line.remove(request)
        is_new = request.started is None
        request.enter(State.PREFILL)
        prefill = self._prefixes.begin(request)
        if is_new:
            self._meter.admitted(request)
        self._places.prompts.add(request, prefill)
        if not self._leaving.end_if_warm(request, prefill):
            self._following.lead(request, prefill.done)

    def _take_fetched(self) -> None:
        for request in reversed(self._fetching.over()):
            request.enter(State.QUEUED)
            self._line.put_first(request)

    def _end_overdue(self) -> None:
        if not self._line or self._clock() - self._looked_through < OVERDUE_S:
            return
        self._looked_through = self._clock()
        for request in self._line.overdue():
            waited_s = self._clock() - request.waits_since
            failure = QueueFull(len(self._line), OVERDUE_RETRY_MS, waited_s=waited_s)
            self._leaving.end(request, State.FAILED, failure)
