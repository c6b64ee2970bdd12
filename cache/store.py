"""The seam for a colder tier: what is told to it, and what it hands back.

`BlockStore` is called by PrefixCache on the model's engine thread. Nothing here reads or writes; the store of files
that implements it decides when to, on threads of its own. All arrays in these values are evaluated, so any thread may
read them, and nobody writes into them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from omlxd.cache.keys import BlockSpec
from omlxd.cache.layouts import State
from omlxd.cache.pieces import Piece

BLOCK, CHECKPOINT = 0, 1  # the kinds of records
Name = tuple[int, bytes]  # kind and key


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block as it leaves or enters memory; `parent` is the key before it, the identity's digest for the first."""

    parent: bytes
    spec: BlockSpec
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """Recurrent state after the tokens of `spec`, which is the (partial) block that ends at its position."""

    parent: bytes
    spec: BlockSpec
    states: Sequence[State]


def _nobody(is_kept: bool) -> None:
    """Where nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A record for the store to keep. It calls `tell` once, on any thread: whether it has the record now."""

    record: StoredBlock | StoredCheckpoint
    tell: Callable[[bool], None] = _nobody

    @property
    def name(self) -> Name:
        return CHECKPOINT if isinstance(self.record, StoredCheckpoint) else BLOCK, self.record.spec.key

    @property
    def nbytes(self) -> int:
        """The record's arrays, and a block's token ids."""
        if isinstance(self.record, StoredCheckpoint):
            return sum(slot.nbytes for state in self.record.states for slot in state if slot is not None)
        return sum(piece.nbytes for piece in self.record.pieces) + len(self.record.spec.tokens)


class BlockStore(Protocol):
    """Where blocks go besides memory."""

    def offer(self, offer: Offer) -> None:
        """Something was published. Returns at once; a store that is too busy to keep it counts that itself."""
        ...

    def takes(self, nbytes: int) -> bool:
        """Whether an offer of that size would be taken now: for what memory has no room for, and nobody keeps else."""
        ...

    def missed(self, names: Collection[Name]) -> None:
        """These were published and not offered: memory has no room for them, and the store has none."""
        ...

    def used(self, keys: Iterable[bytes]) -> None:
        """The blocks of these keys answered for a prompt. Returns at once."""
        ...
