"""What a prefix tree holds: blocks, the checkpoints that hang on them, and what a lookup found of both.

Plain objects of one tree. The tree links them and the hot tier counts them; both change them under the tier's lock, and
nobody else does. A block's arrays are read by any thread once they are computed, and written by none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from omlxd.cache.children import Children
from omlxd.cache.hot import Entry
from omlxd.cache.keys import BlockSpec
from omlxd.cache.layouts import State
from omlxd.cache.pieces import Piece


@dataclass(slots=True, eq=False, weakref_slot=True)
class Block:
    """A stored block. `pieces` has one for each sliceable leaf; `parent` is None for a prompt's first."""

    spec: BlockSpec
    parent: Block | None
    siblings: Children[Block]
    pieces: Sequence[Piece] = ()
    gaps: tuple[tuple[int, range], ...] = ()
    nbytes: int = 0
    children: Children[Block] = field(default_factory=Children)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    pins: int = 0
    last_use: int = 0
    alive: bool = True
    offers: int = 0
    on_disk: bool = False
    computed: bool = False  # its arrays are evaluated: any thread may read them

    @property
    def is_leaf(self) -> bool:
        return not len(self.children) and not self.checkpoints

    def unlink(self) -> Entry | None:
        self.siblings.remove(self)
        return self.parent

    def set_pieces(self, pieces: Sequence[Piece]) -> None:
        """Gives the block its arrays; `gaps` are then the leaves that lack rows, and of which positions."""
        start = self.spec.start
        self.pieces = pieces
        self.computed = False
        self.nbytes = block_nbytes(self.spec, pieces)
        self.gaps = tuple(
            (index, range(start + piece.gap.start, start + piece.gap.stop))
            for index, piece in enumerate(pieces)
            if piece.gap
        )


@dataclass(slots=True, eq=False, weakref_slot=True)
class Checkpoint:
    """The recurrent leaves' state after exactly `position` tokens, the last of which are in `block`."""

    block: Block
    position: int
    states: Sequence[State]
    nbytes: int
    pins: int = 0
    last_use: int = 0
    alive: bool = True
    offers: int = 0
    on_disk: bool = False

    @property
    def is_leaf(self) -> bool:
        return True

    def unlink(self) -> Entry | None:
        del self.block.checkpoints[self.position]
        return self.block


@dataclass(frozen=True, slots=True)
class Match:
    """What is stored for a prompt: `blocks` cover its first `position` tokens, `checkpoint` stands at that position."""

    blocks: tuple[Block, ...] = ()
    position: int = 0
    checkpoint: Checkpoint | None = None


def block_nbytes(spec: BlockSpec, pieces: Sequence[Piece]) -> int:
    """A block's bytes: its arrays' and its token ids'. The latter keep a block without arrays from being free."""
    return sum(piece.nbytes for piece in pieces) + len(spec.tokens)


def states_nbytes(states: Sequence[State]) -> int:
    return sum(slot.nbytes for state in states for slot in state if slot is not None)
