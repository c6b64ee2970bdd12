"""One prefill per prefix: whose prompt computes a prefix right now that another request also needs.

Owned by the engine thread. A request that shares at least a block with a prompt under way, beyond what is stored
already, waits until the shared part is stored instead of computing it a second time. It waits for progress, not for a
promise: when the leader ends, leaves, or gets nowhere for STALLED_S, its followers go on by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omlxd.engine.line import Hold
from omlxd.engine.request import Clock, Request

STALLED_S = 30.0

Tokens = NDArray[np.uint32]


@dataclass(slots=True)
class _Leader:
    """A prompt under way. `available` is how many of its tokens others can reuse by now."""

    tokens: Tokens
    stops: list[int]
    available: int
    moved_at: float
    shared: dict[str, int] = field(default_factory=dict)  # tokens in common with each request that was compared


class Following:
    """The prompts under way that others may follow."""

    def __init__(self, clock: Clock, *, block_size: int, only_at_checkpoints: bool) -> None:
        self._clock = clock
        self._block_size = block_size
        self._only_at_checkpoints = only_at_checkpoints
        self._leaders: dict[str, _Leader] = {}

    def lead(self, request: Request, stops: list[int], available: int) -> None:
        """The request's prompt is being computed from `available` on. `stops` are its checkpoints to come."""
        if request.job.use_cache and self._block_size:
            self._leaders[request.id] = _Leader(_array(request), stops, available, self._clock())

    def moved(self, request: Request, available: int) -> None:
        leader = self._leaders.get(request.id)
        if leader is not None:
            leader.available, leader.moved_at = available, self._clock()

    def stop(self, request: Request) -> None:
        """The request no longer computes its prompt."""
        self._leaders.pop(request.id, None)

    def hold_for(self, request: Request, stored: Callable[[Request], int]) -> Hold | None:
        """Whom the request should wait for, if anybody. `stored` tells how much of it could be reused at once."""
        if not request.job.use_cache or not self._leaders:
            return None
        best: Hold | None = None
        for id, leader in self._leaders.items():
            if self._stalled(leader):
                continue
            until = self._usable(leader, self._shared(leader, request))
            if until > leader.available and (best is None or until > best.until):
                best = Hold(request, id, until)
        if best is None or best.until - stored(request) < self._block_size:
            return None
        return best

    def over(self, hold: Hold) -> bool:
        """Whether there is nothing left to wait for."""
        leader = self._leaders.get(hold.leader)
        if leader is None or leader.available >= hold.until:
            return True
        return self._stalled(leader)

    def _stalled(self, leader: _Leader) -> bool:
        return self._clock() - leader.moved_at > STALLED_S

    def _shared(self, leader: _Leader, request: Request) -> int:
        if request.id not in leader.shared:
            leader.shared[request.id] = _common(leader.tokens, _array(request))
        return leader.shared[request.id]

    def _usable(self, leader: _Leader, shared: int) -> int:
        """How much of what the two have in common will be stored while the leader goes on."""
        if self._only_at_checkpoints:
            return max((stop for stop in leader.stops if stop <= shared), default=0)
        return shared - shared % self._block_size


def _array(request: Request) -> Tokens:
    return np.array(request.tokens, dtype=np.uint32)


def _common(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are the same, of `b` all but the last: that one is computed in any case."""
    length = min(len(a), len(b) - 1)
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length
