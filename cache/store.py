"""The seam for a colder tier: what is told to it, and what it hands back.

`BlockStore` is called by PrefixCache on the model's engine thread. Nothing here reads or writes; the store of files
that implements it decides when to, on threads of its own. All arrays in these values are evaluated, so any thread may
read them, and nobody writes into them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class BlockStore(Protocol):
    """Where blocks go besides memory."""

    def offer(self, record: StoredBlock | StoredCheckpoint) -> None:
        """Something was published. Returns at once; a store that is too busy to keep it counts that itself."""
        ...

    def used(self, keys: Iterable[bytes]) -> None:
        """The blocks of these keys answered for a prompt. Returns at once."""
        ...
