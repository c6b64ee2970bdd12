"""The line of requests that wait for a row, and those held back because another request computes their prefix.

Owned by the engine thread. Interactive requests go before batch ones, each in order of arrival; a batch request that
has waited AGEING_S goes first of all, so that nothing starves, and whoever has waited LONGEST_S has waited in vain.
Looking at the head costs the same however long the line is. A held request is out of the line: whoever is behind it
passes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from omlxd.engine.request import Clock, Request, State

AGEING_S = 30.0
LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True)
class Hold:
    """`request` waits until `leader` has computed and stored its first `until` tokens."""

    request: Request
    leader: str
    until: int


class Line:
    """Who waits, in which order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._interactive: OrderedDict[str, Request] = OrderedDict()
        self._batch: OrderedDict[str, Request] = OrderedDict()
        self._held: dict[str, Hold] = {}

    def __len__(self) -> int:
        return len(self._interactive) + len(self._batch) + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        yield from self._interactive.values()
        yield from self._batch.values()
        yield from (hold.request for hold in self._held.values())

    def get(self, id: str) -> Request | None:
        if id in self._held:
            return self._held[id].request
        return self._interactive.get(id) or self._batch.get(id)

    def add(self, request: Request) -> None:
        self._side(request)[request.id] = request

    def put_first(self, request: Request) -> None:
        """Back into the line, ahead of its kind: it was there before them."""
        side = self._side(request)
        side[request.id] = request
        side.move_to_end(request.id, last=False)

    def remove(self, request: Request) -> None:
        self._held.pop(request.id, None)
        self._side(request).pop(request.id, None)

    def defers(self, request: Request) -> bool:
        """Whether the request lets interactive ones go first: a batch request that has not waited too long yet."""
        return request.job.batch_priority and self._clock() - request.submitted < AGEING_S

    def head(self, count: int) -> list[Request]:
        """The next `count` requests, best first."""
        batch = list(islice(self._batch.values(), count))
        aged = [request for request in batch if not self.defers(request)]
        later = [request for request in batch if self.defers(request)]
        return [*aged, *islice(self._interactive.values(), count), *later][:count]

    def overdue(self) -> list[Request]:
        """Those whose turn should have come long ago, held ones among them."""
        now = self._clock()
        return [request for request in self if now - request.waits_since > LONGEST_S]

    @property
    def waiting(self) -> int:
        """How many wait for a row; held ones wait for a prompt that has one."""
        return len(self._interactive) + len(self._batch)

    @property
    def interactive_waits(self) -> bool:
        return bool(self._interactive)

    # -- holding ------------------------------------------------------------------------------------------------------

    def hold(self, hold: Hold) -> None:
        self.remove(hold.request)
        hold.request.enter(State.HELD, f"{hold.leader} computes its first {hold.until} tokens")
        self._held[hold.request.id] = hold

    @property
    def holds(self) -> list[Hold]:
        return list(self._held.values())

    def release(self, holds: Sequence[Hold]) -> None:
        """Back into the line, in the order in which they were held."""
        for hold in reversed(holds):
            del self._held[hold.request.id]
            hold.request.enter(State.QUEUED)
            self.put_first(hold.request)

    def _side(self, request: Request) -> OrderedDict[str, Request]:
        return self._batch if request.job.batch_priority else self._interactive
