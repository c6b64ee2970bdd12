"""What the requests of one engine hold in the ledger: each one's caches, and what standing in one batch takes beside.

Used by `engine/memory.py`, on the engine thread. Bytes are given back when the arrays have really gone: a batch that
rows have left or joined is cut or copied by the next step's computation, and that one is known to be over only at the
end of the step after it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import mlx.core as mx

from omlxd.engine.estimator import KvCost
from omlxd.engine.ledger import Ledger, Reservation

STEPS_BEHIND = 2  # from dropping an array to when what is computed with it is over


@dataclass(slots=True, eq=False)
class Held:
    """A request's caches in the ledger: for `tokens` tokens."""

    reservation: Reservation
    tokens: int
    in_batch: bool = False  # nothing is left of its caches outside of the batch
    has_asked: bool = False  # others to make room for its growth


@dataclass(slots=True, eq=False)
class _Settling:
    """What a row's coming or going leaves behind for some steps: `held` goes with it, or only its own caches do."""

    held: Held
    gone: bool
    steps: int = STEPS_BEHIND


class Holdings:
    """The caches of one engine's requests."""

    def __init__(self, name: str, ledger: Ledger, kv: KvCost, *, merges_rows: bool) -> None:
        self._kv = kv
        self._merges_rows = merges_rows
        self._held: dict[str, Held] = {}
        self._settling: list[_Settling] = []
        self._padding = ledger.hold(name, "padding", 0)

    def __len__(self) -> int:
        return len(self._held)

    def get(self, id: str) -> Held | None:
        return self._held.get(id)

    @property
    def nbytes(self) -> int:
        """Of all requests' caches."""
        return self._padding.nbytes + sum(held.reservation.nbytes for held in self._present())

    @property
    def somebody_leaves(self) -> bool:
        """Whether bytes come back within the next steps."""
        return any(each.gone for each in self._settling)

    # -- what it would take -------------------------------------------------------------------------------------------

    def alone(self, tokens: int) -> int:
        """Bytes of a request of `tokens` in a batch of its own."""
        return self._kv.bytes(tokens) + self._padding_of([(tokens, False)])

    def more(self, tokens: int, *, than: Held | None = None) -> int:
        """Bytes that one more request of `tokens` takes; or one that has some already and comes to `tokens`."""
        others = [(held.tokens, held.in_batch) for held in self._present() if held is not than]
        after = [*others, (tokens, than is not None and than.in_batch)]
        caches = self._kv.bytes(tokens) - (0 if than is None else than.reservation.nbytes)
        return caches + max(0, self._padding_of(after) - self._padding.nbytes)

    def _present(self) -> list[Held]:
        """Everybody who still has arrays, those among them who have left."""
        return [*self._held.values(), *(each.held for each in self._settling if each.gone)]

    def _pad(self) -> None:
        self._padding.resize(self._padding_of([(held.tokens, held.in_batch) for held in self._present()]))

    def _padding_of(self, rows: Collection[tuple[int, bool]]) -> int:
        """What a batch of rows, of so many tokens and in the batch or not, takes beside their own bytes.

        Rows are as long as the longest; one that joins stands there twice until it is copied; and a batch that rows
        join or leave is copied, a layer at a time.
        """
        if not self._merges_rows or not rows:
            return 0
        lengths = [tokens for tokens, _ in rows]
        joining = max((self._kv.bytes(tokens) for tokens, in_batch in rows if not in_batch), default=0)
        padding = self._kv.padding(lengths)
        batch = padding + sum(self._kv.bytes(length) for length in lengths)
        return padding + joining + 2 * batch // max(1, len(self._kv.leaves))

    # -- what happens -------------------------------------------------------------------------------------------------

    def take(self, id: str, reservation: Reservation, tokens: int) -> None:
        """A request begins, with what was reserved for it; what that is too large by goes back."""
        self._held[id] = Held(reservation, tokens)
        reservation.resize(self._kv.bytes(tokens))
        self._pad()

    def grow(self, held: Held, tokens: int) -> None:
        held.tokens, held.has_asked = tokens, False
        held.reservation.resize(self._kv.bytes(tokens))
        self._pad()

    def joined(self, id: str) -> None:
        """The request's caches are being copied into the batch."""
        held = self._held.get(id)
        if held is not None:
            self._settling.append(_Settling(held, gone=False))

    def leave(self, id: str) -> None:
        """The request ends, or goes back into the line."""
        held = self._held.pop(id, None)
        if held is not None:
            self._settling.append(_Settling(held, gone=True))

    def step_over(self) -> None:
        """A step has been computed, and its rows' tokens are known."""
        for each in self._settling:
            each.steps -= 1
        self._settle([each for each in self._settling if each.steps < 0])

    def at_rest(self) -> None:
        """No request is being computed: waits for what still is, the last step of those who have left."""
        if self._settling:
            mx.synchronize()
            self._settle(self._settling)

    def _settle(self, over: Collection[_Settling]) -> None:
        if not over:
            return
        for each in over:
            each.held.in_batch = True
            if each.gone:
                each.held.reservation.release()
        self._settling = [each for each in self._settling if each not in over]
        self._pad()

    def close(self) -> None:
        """The engine has let go of everything."""
        for held in self._present():
            held.reservation.release()
        self._held.clear()
        self._settling.clear()
        self._padding.release()
