"""One engine's work in the ledger: what it may begin, how large its turns may be, and what it holds meanwhile.

Stands between the engine's loop and the guard that all engines share, on the engine thread. A request reserves its
caches before it is admitted, for its tokens so far and some to come, and asks for more before it has used them up; a
turn reserves its transient before it is computed. What a request can never have is refused before anything runs; what
it cannot have yet it waits for, as long as there is something to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx

from omlxd.engine.api import MemoryExceeded
from omlxd.engine.estimator import ROWS_PER_STEP, Costs, TurnEstimator
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.holdings import Held, Holdings
from omlxd.engine.ledger import Reservation
from omlxd.engine.limits import Level
from omlxd.engine.picture_memory import PictureMemory
from omlxd.engine.prefill import Prefill
from omlxd.engine.request import Clock, Request
from omlxd.engine.scheduler import MIN_TURN_TOKENS, SchedulerLimits

GROWTH_TOKENS = ROWS_PER_STEP  # of answer that a request has reserved ahead: a row in a batch takes so many at once
ASK_AHEAD_TOKENS = 16  # so long before they are used up it asks for more: others need some steps to make way
UNDER_WAY_TOKENS = 2  # of a row that are computed already, or just being computed, when its latest is known
PATIENCE_S = 5.0  # of one who waits for memory that nobody can free
ASK_AGAIN_S = 1.0  # how often one who waits says so

WAITS_FOR_MEMORY = "waits for memory"  # the reason of a request that does


@dataclass(slots=True)
class _Wait:
    """A request that waits for memory: since when in vain, and when it last said so."""

    since: float
    asked: float


class WorkMemory:
    """The memory of one model's requests."""

    def __init__(
        self,
        name: str,
        guard: MemoryGuard,
        costs: Costs,
        clock: Clock,
        *,
        merges_rows: bool,
        pictures: PictureMemory | None = None,
    ) -> None:
        """`costs` may be those of nothing, for a model that was not measured; then only the ladder's orders hold."""
        self._name = name
        self._guard = guard
        self._kv = costs.kv
        self._turns = TurnEstimator(costs.widths, costs.kv)
        self._clock = clock
        self._holdings = Holdings(name, guard.ledger, costs.kv, merges_rows=merges_rows)
        self._pictures = pictures or PictureMemory(name, guard.ledger, None)
        self._waits: dict[str, _Wait] = {}

    # -- before a request begins --------------------------------------------------------------------------------------

    def refusal(self, request: Request) -> MemoryExceeded | None:
        """Why a request could never run, whatever else is given up for it; None if it could."""
        tokens = self._longest(request)
        room_ahead = 0 if request.job.warm else GROWTH_TOKENS - 1
        caches = self._holdings.alone(tokens + room_ahead) + self._turns.bytes(MIN_TURN_TOKENS, tokens)
        tensors = sum(picture.nbytes for picture in request.job.pictures)
        needed = caches + tensors + self._pictures.most(request.job.pictures)
        refused = self._guard.refusal("the request", needed, advice="", staying=[self._name])
        if refused is None:
            return None
        room = self._guard.most(staying=[self._name])
        fits = tokens * room // needed  # near enough: nearly all of it is caches
        advice = (
            f"it has {len(request.job.prompt)} tokens and asks for {request.job.max_tokens}, about {fits} fit in all: "
            "shorten it, lower max_tokens, unpin other models or raise memory.limit_bytes"
        )
        return self._guard.refusal("the request", needed, advice=advice, staying=[self._name])

    def admit(self, request: Request) -> bool:
        """Reserves the request's caches; False while there is no room for them."""
        if self._holdings.get(request.id) is not None:
            return True
        orders = self._guard.limits.orders
        tokens = self._foreseen(request)
        needed = self._holdings.more(tokens) + self._at_first(request)
        may = orders.admits or orders.exhausted
        reservation = self._reserve(request, needed) if may else None
        if reservation is None:
            self._waits.setdefault(request.id, _Wait(self._clock(), self._clock()))
            return False
        if not len(self._holdings):
            self._guard.stir()  # an idle daemon's readings are far apart
        self._waits.pop(request.id, None)
        self._holdings.take(request.id, reservation, tokens)
        self._pictures.take(request.id, request.job.pictures)
        return True

    def _at_first(self, request: Request) -> int:
        """What a request takes beside its caches when it begins: its pictures, and a turn or the sight of one."""
        pictures = request.job.pictures
        turn = self._turns.bytes(MIN_TURN_TOKENS, request.length)
        return max(self._pictures.waiting(pictures) + turn, self._pictures.most(pictures))

    def _reserve(self, request: Request, needed: int) -> Reservation | None:
        reservation = self._guard.reserve(self._name, "kv", needed)
        if reservation is None and self._pictures.make_room():
            reservation = self._guard.reserve(self._name, "kv", needed)
        if reservation is not None:
            return reservation
        wait = self._waits.get(request.id)
        if wait is not None and self._clock() - wait.asked < ASK_AGAIN_S:
            return None
        if wait is not None:
            wait.asked = self._clock()
        self._guard.want_room(needed)  # some of it may be there at once
        return self._guard.reserve(self._name, "kv", needed)

    def lost_patience(self, request: Request) -> MemoryExceeded | None:
        """The end of a wait in vain: nobody has anything left to give back. None while there is hope."""
        wait = self._waits.get(request.id)
        if wait is None:
            return None
        limits = self._guard.limits
        somebody_ends = bool(self._guard.ledger.held(["kv", "load"]))
        if somebody_ends and not (limits.orders.exhausted and limits.level is Level.HARD):
            wait.since = self._clock()
            return None
        if self._clock() - wait.since < PATIENCE_S:
            return None
        del self._waits[request.id]
        return self._guard.gave_up(
            f"the request, after {PATIENCE_S:g} s of waiting,",
            self._kv.bytes(self._foreseen(request)) + self._at_first(request),
            advice="nothing more can be freed now; try again later, unload a model or raise memory.limit_bytes",
        )

    @property
    def somebody_waits(self) -> bool:
        return bool(self._waits)

    def _foreseen(self, request: Request) -> int:
        """Tokens to reserve for now. However short the answer, its row in the batch has room for GROWTH_TOKENS."""
        return request.length + (0 if request.job.warm else GROWTH_TOKENS)

    def _longest(self, request: Request) -> int:
        """Tokens that it could come to."""
        return len(request.job.prompt) + (0 if request.job.warm else request.job.max_tokens)

    # -- while it runs ------------------------------------------------------------------------------------------------

    def grow(self, request: Request) -> bool:
        """The request has a token more. False while the memory that it needs for those to come is not there."""
        held = self._holdings.get(request.id)
        if held is None or min(request.length + ASK_AHEAD_TOKENS, self._longest(request)) <= held.tokens:
            return True
        tokens = held.tokens + GROWTH_TOKENS
        more = self._holdings.more(tokens, than=held)
        granted = self._reserve_growth(held, more) if more > 0 else None
        if more > 0 and granted is None:
            return False
        self._holdings.grow(held, tokens)
        if granted is not None:
            granted.release()  # the request's own entries have it now
        return True

    def _reserve_growth(self, held: Held, more: int) -> Reservation | None:
        """Running answers may have what is above the mark of admission: they would lose by waiting.

        One that has its engine to itself ends there only for a limit that stays, not for one that jumps.
        """
        reservation = self._guard.reserve(self._name, "kv", more)
        if reservation is None and not held.has_asked:
            held.has_asked = True
            self._guard.want_room(more)
        limits = self._guard.limits
        mark = limits.abort if len(self._holdings) == 1 else limits.hard
        return reservation or self._guard.reserve_up_to(mark, self._name, "kv", more)

    def is_spent(self, request: Request) -> bool:
        """Whether the request has no memory left for the next step."""
        held = self._holdings.get(request.id)
        return held is not None and request.length + UNDER_WAY_TOKENS > held.tokens

    @property
    def somebody_leaves(self) -> bool:
        """Whether bytes of somebody who has left come back within the next steps."""
        return self._holdings.somebody_leaves

    def joined(self, request: Request) -> None:
        """The request's caches are being copied into the batch."""
        self._holdings.joined(request.id)

    def leave(self, request: Request) -> None:
        """The request ends, or goes back into the line; its bytes are given back when its arrays have gone."""
        self._waits.pop(request.id, None)
        self._holdings.leave(request.id)
        self._pictures.leave(request.id)

    def step_over(self, *, at_rest: bool) -> None:
        """A step is over; `at_rest`: and nothing has a place any more."""
        if at_rest:
            self._holdings.at_rest()
        else:
            self._holdings.step_over()

    def close(self) -> None:
        """The engine has let go of everything."""
        self._waits.clear()
        self._holdings.close()
        self._pictures.close()

    @property
    def held_bytes(self) -> int:
        """Of all requests' caches and pictures."""
        return self._holdings.nbytes + self._pictures.nbytes

    # -- turns --------------------------------------------------------------------------------------------------------

    def turn_limits(self, limits: SchedulerLimits, prompts: Sequence[Prefill]) -> SchedulerLimits:
        """`limits`, with turns as small as the ladder asks for and as fit up to the hard mark; never larger ones."""
        memory = self._guard.limits
        share = memory.orders.chunk_share
        if share < 1:
            self._pictures.make_room()
        done = max((prefill.done for prefill in prompts), default=0)
        room = memory.hard - self._guard.usage
        chunk = self._turns.most_tokens(limits.prefill_chunk, least=MIN_TURN_TOKENS, done=done, room=room)
        if share == 1 and chunk == limits.prefill_chunk:
            return limits
        return replace(
            limits,
            prefill_chunk=min(chunk, max(MIN_TURN_TOKENS, int(share * limits.prefill_chunk))),
            max_chunk_ms=share * limits.max_chunk_ms,
            max_decode_stall_ms=share * limits.max_decode_stall_ms,
        )

    @contextmanager
    def turn(self, *, tokens: int, context: int, rows: int = 1, logits: int = 0) -> Iterator[None]:
        """Holds a turn's transient while it is computed, and learns from what it took."""
        chunk = self._guard.ledger.hold(self._name, "chunk", self._turns.bytes(tokens, context, rows, logits))
        mx.reset_peak_memory()
        try:
            yield
            took = mx.get_peak_memory() - mx.get_active_memory()
            self._turns.took(took, tokens=tokens, context=context, rows=rows, logits=logits)
        finally:
            chunk.release()
