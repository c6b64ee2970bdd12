"""One engine's work in the ledger: what it may begin, how large its turns may be, and what it holds meanwhile.

Stands between the engine's loop and the guard that all engines share, on the engine thread. A request reserves its
caches before it is admitted, for its tokens so far and some to come, and more as it grows; a turn reserves its
transient before it is computed. What a request can never have is refused before anything runs; what it cannot have
yet it waits for, as long as there is something to wait for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx

from omlxd.engine.api import MemoryExceeded
from omlxd.engine.estimator import Costs, TurnEstimator
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.ledger import Reservation
from omlxd.engine.limits import Level
from omlxd.engine.picture_memory import PictureMemory
from omlxd.engine.prefill import Prefill
from omlxd.engine.request import Clock, Request
from omlxd.engine.scheduler import MIN_TURN_TOKENS, SchedulerLimits

GROWTH_TOKENS = 256  # of answer that a request has reserved ahead
PATIENCE_S = 5.0  # of one who waits for memory that nobody can free
ASK_AGAIN_S = 1.0  # how often one who waits says so

WAITS_FOR_MEMORY = "waits for memory"  # the reason of a request that does


@dataclass(slots=True)
class _Held:
    """A request's caches in the ledger: for `tokens` tokens."""

    reservation: Reservation
    tokens: int
    joined: bool = False  # its caches are in the batch


@dataclass(slots=True)
class _Wait:
    """A request that waits for memory: since when, and when it last said so."""

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
        self._merges_rows = merges_rows
        self._held: dict[str, _Held] = {}
        self._gone: list[_Held] = []
        self._pictures = pictures or PictureMemory(name, guard.ledger, None)
        self._waits: dict[str, _Wait] = {}
        self._padding = guard.ledger.hold(name, "padding", 0)

    # -- before a request begins --------------------------------------------------------------------------------------

    def refusal(self, request: Request) -> MemoryExceeded | None:
        """Why a request could never run, whatever else is given up for it; None if it could."""
        tokens = self._most_tokens(request)
        alone = self._padding_of([_Held(self._padding, tokens)])
        caches = self._kv.bytes(tokens) + alone + self._turns.bytes(MIN_TURN_TOKENS, tokens)
        needed = caches + self._pictures.most(request.job.pictures)
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
        if request.id in self._held:
            return True
        orders = self._guard.limits.orders
        tokens = min(request.length + GROWTH_TOKENS, self._most_tokens(request))
        pictures = self._pictures.waiting(request.job.pictures)
        needed = self._kv.bytes(tokens) + self._more_padding(tokens) + pictures
        turn = self._turns.bytes(MIN_TURN_TOKENS, request.length)
        may = orders.admits or orders.exhausted
        reservation = self._reserve(request, needed + turn) if may else None
        if reservation is None:
            self._waits.setdefault(request.id, _Wait(self._clock(), self._clock()))
            return False
        if not self._held:
            self._guard.stir()  # an idle daemon's readings are far apart
        reservation.resize(self._kv.bytes(tokens))
        self._waits.pop(request.id, None)
        self._held[request.id] = _Held(reservation, tokens)
        self._pictures.take(request.id, request.job.pictures)
        self._pad()
        return True

    def _reserve(self, request: Request, needed: int) -> Reservation | None:
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
        if wait is None or self._clock() - wait.since < PATIENCE_S:
            return None
        limits, ledger = self._guard.limits, self._guard.ledger
        nothing_runs = not ledger.held(["kv", "load"])
        if not nothing_runs and not (limits.orders.exhausted and limits.level is Level.HARD):
            return None
        del self._waits[request.id]
        tokens = min(request.length + GROWTH_TOKENS, self._most_tokens(request))
        return self._guard.gave_up(
            f"the request, after {PATIENCE_S:g} s of waiting,",
            self._kv.bytes(tokens) + self._turns.bytes(MIN_TURN_TOKENS, request.length),
            advice="nothing more can be freed now; try again later, unload a model or raise memory.limit_bytes",
        )

    @property
    def somebody_waits(self) -> bool:
        return bool(self._waits)

    def _most_tokens(self, request: Request) -> int:
        return len(request.job.prompt) + (0 if request.job.warm else request.job.max_tokens)

    # -- while it runs ------------------------------------------------------------------------------------------------

    def grow(self, request: Request) -> None:
        """The request has a token more. What it then needs is taken: the ladder sees to the rest."""
        held = self._held.get(request.id)
        if held is None or request.length <= held.tokens:
            return
        held.tokens = request.length + GROWTH_TOKENS
        held.reservation.resize(self._kv.bytes(held.tokens))
        self._pad()

    def leave(self, request: Request) -> None:
        """The request ends, or goes back into the line; its bytes are given back by `arrays_dropped`."""
        self._waits.pop(request.id, None)
        self._pictures.leave(request.id)
        held = self._held.pop(request.id, None)
        if held is not None:
            self._gone.append(held)

    def arrays_dropped(self) -> None:
        """Nothing of those who have left is in the batch any more."""
        if not self._gone:
            return
        for held in self._gone:
            held.reservation.release()
        self._gone.clear()
        self._pad()

    def close(self) -> None:
        """The engine has let go of everything."""
        for held in [*self._held.values(), *self._gone]:
            held.reservation.release()
        self._held.clear()
        self._gone.clear()
        self._waits.clear()
        self._padding.release()
        self._pictures.close()

    @property
    def held_bytes(self) -> int:
        """Of all requests' caches and pictures."""
        own = self._padding.nbytes + self._pictures.nbytes
        return own + sum(held.reservation.nbytes for held in self._held.values())

    def joined(self, request: Request) -> None:
        """The request's own caches have been copied into the batch and are gone."""
        held = self._held.get(request.id)
        if held is not None:
            held.joined = True
            self._pad()

    def _more_padding(self, tokens: int) -> int:
        asked = [*self._held.values(), _Held(self._padding, tokens)]
        return max(0, self._padding_of(asked) - self._padding.nbytes)

    def _pad(self) -> None:
        self._padding.resize(self._padding_of(self._held.values()))

    def _padding_of(self, held: Collection[_Held]) -> int:
        """What a batch takes beside its rows' own bytes.

        Rows are as long as the longest; one that joins stands there twice until it is copied; and a batch that rows
        join or leave is copied, a layer at a time.
        """
        lengths = [each.tokens for each in held]
        if not self._merges_rows or not lengths:
            return 0
        joining = max((self._kv.bytes(each.tokens) for each in held if not each.joined), default=0)
        padding = self._kv.padding(lengths)
        batch = padding + sum(self._kv.bytes(length) for length in lengths)
        return padding + joining + 2 * batch // max(1, len(self._kv.leaves))

    # -- turns --------------------------------------------------------------------------------------------------------

    def turn_limits(self, limits: SchedulerLimits, prompts: Sequence[Prefill]) -> SchedulerLimits:
        """`limits`, with turns as small as the ladder asks for and as fit up to the hard mark; never larger ones."""
        memory = self._guard.limits
        share = memory.orders.chunk_share
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
            if took > 0:  # another engine's reset may have come in between
                self._turns.took(took, tokens=tokens, context=context, rows=rows, logits=logits)
        finally:
            chunk.release()
