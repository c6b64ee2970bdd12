"""Leaving: how a request ends, or goes back into the line, wherever it is.

Owned by the engine thread. What it has computed is stored first, so that whoever asks again gets further; then it is
counted, told, and taken out of its place.
"""

from __future__ import annotations

from omlxd.engine.inbox import Abort, Refuse
from omlxd.engine.metrics import Meter
from omlxd.engine.places import Places
from omlxd.engine.prefill import Prefill
from omlxd.engine.reporting import Reports
from omlxd.engine.request import Request, State
from omlxd.engine.stream import Event


class Leaving:
    """The ways out of one model's places."""

    def __init__(self, places: Places, meter: Meter, reports: Reports) -> None:
        self._places = places
        self._meter = meter
        self._reports = reports

    def end(self, request: Request, state: State, event: Event) -> None:
        """The request is over. Its row, if it has one, stays in the batch until that is told."""
        request.enter(state)
        self._reports.ended(request, event)
        self._places.forget(request)

    def end_if_warm(self, request: Request, prefill: Prefill) -> bool:
        """Ends a request that only warms the cache, once all that can be stored of its prompt is."""
        if not request.job.warm or prefill.remaining:
            return False
        self.end(request, State.FINISHED, request.result("stop"))
        return True

    def preempt(self, id: str, reason: str) -> None:
        """Takes a request out of its place and back into the line; what it has computed is kept."""
        places = self._places
        request = places.rows.get(id) or places.prompts[id][0]
        places.keep(request)
        places.requeue(request, reason)
        self._meter.preempted()
        self._reports.waits(request)

    def preempt_if_placed(self, id: str, reason: str) -> None:
        """The same, for whoever may have left by itself."""
        if id in self._places.rows or id in self._places.prompts:
            self.preempt(id, reason)

    def abort(self, command: Abort) -> None:
        request = self._places.find(command.id)
        if request is not None:  # else it ended before the command came
            self._cut_off(request, State.CANCELLED, request.cancelled(command.reason))

    def refuse(self, command: Refuse) -> None:
        request = self._places.find(command.id)
        if request is not None:
            self._cut_off(request, State.FAILED, command.error)

    def _cut_off(self, request: Request, state: State, event: Event) -> None:
        self._places.keep(request)
        self.end(request, state, event)
        self._places.batch.remove(frozenset({request.id}))
