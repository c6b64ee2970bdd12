"""One prefill per prefix: whose prompt computes a prefix right now that another request also needs.

Owned by the engine thread. A request that shares at least a block with a prompt under way, beyond what is stored
already, waits until the shared part is stored instead of computing it a second time; the prompt under way then stops
once where the two part, to store it to the token. It waits for progress, not for a promise: when the leader ends,
leaves, or gets nowhere for STALLED_S, its followers go on by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omlxd.cache.keys import MediaSpan
from omlxd.engine.line import Hold
from omlxd.engine.request import Clock, Request

STALLED_S = 30.0

Tokens = NDArray[np.uint32]


@dataclass(slots=True)
class _Leader:
    """A prompt under way: how many of its tokens are computed, and how many others can reuse by now."""

    tokens: Tokens
    media: Sequence[MediaSpan]
    computed: int
    stored: int
    moved_at: float
    shared: dict[str, int] = field(default_factory=dict)  # tokens in common with each request that was compared


class Following:
    """The prompts under way that others may follow."""

    def __init__(self, clock: Clock, *, block_size: int) -> None:
        """`block_size` 0: nothing is stored, and nobody waits."""
        self._clock = clock
        self._block_size = block_size
        self._leaders: dict[str, _Leader] = {}

    def lead(self, request: Request, computed: int) -> None:
        """The request's prompt is being computed from `computed` on, and what comes before is stored."""
        if request.job.use_cache and self._block_size:
            self._leaders[request.id] = _Leader(_array(request), request.media, computed, computed, self._clock())

    def moved(self, request: Request, *, computed: int, stored: int) -> None:
        leader = self._leaders.get(request.id)
        if leader is not None:
            leader.computed, leader.stored, leader.moved_at = computed, stored, self._clock()

    def stop(self, request: Request) -> None:
        """The request no longer computes its prompt."""
        self._leaders.pop(request.id, None)

    def hold_for(self, request: Request, stored: Callable[[Request], int]) -> Hold | None:
        """Whom the request should wait for, if anybody. `stored` tells how much of it could be reused at once."""
        if not request.job.use_cache or not self._leaders:
            return None
        best: Hold | None = None
        for id, leader in self._leaders.items():
            until = self._shared(leader, request)
            ahead = until > leader.computed and not self._stalled(leader)
            if ahead and (best is None or until > best.until):
                best = Hold(request, id, until)
        if best is None or best.until - stored(request) < self._block_size:
            return None
        return best

    def over(self, hold: Hold) -> bool:
        """Whether there is nothing left to wait for."""
        leader = self._leaders.get(hold.leader)
        if leader is None or leader.stored >= hold.until or leader.computed > hold.until:
            return True
        return self._stalled(leader)

    def _stalled(self, leader: _Leader) -> bool:
        return self._clock() - leader.moved_at > STALLED_S

    def _shared(self, leader: _Leader, request: Request) -> int:
        if request.id not in leader.shared:
            run = _common(leader.tokens, _array(request))
            leader.shared[request.id] = _with_the_same_pictures(run, leader.media, request.media)
        return leader.shared[request.id]


def _array(request: Request) -> Tokens:
    return np.array(request.tokens, dtype=np.uint32)


def _common(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are the same, of `b` all but the last: that one is computed in any case."""
    length = min(len(a), len(b) - 1)
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def _with_the_same_pictures(run: int, one: Sequence[MediaSpan], other: Sequence[MediaSpan]) -> int:
    """How much of a common run stands for the same: a picture that only one of the two has there ends it."""
    return min([run, *(span.start for span in {*one} ^ {*other})])
