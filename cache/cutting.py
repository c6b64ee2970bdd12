"""Cutting blocks out of a request's caches: what is to be cut, and the pieces that come of it.

Pure functions, on the engine thread; everything returned is lazy. A piece never shares a buffer with the cache that it
was cut from, and what the cache no longer has may come from another block that begins with the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from omlxd.cache.entries import Block
from omlxd.cache.keys import BlockSpec
from omlxd.cache.layouts import Held
from omlxd.cache.pieces import Piece, completed, cut


@dataclass(frozen=True, slots=True)
class Job:
    """A block to be cut: new, or the stored `block`, whose gaps may now be filled.

    `donor` are the pieces of a block whose first `shared` tokens are the same.
    """

    spec: BlockSpec
    block: Block | None = None
    donor: Sequence[Piece] = ()
    shared: int = 0


def pieces_of(job: Job, held: Sequence[Held]) -> list[Piece]:
    """The block's pieces, lazy: what the caches hold of it, completed from the donor, each an array of its own."""
    donors: Sequence[Piece | None] = job.donor or [None] * len(held)
    return [_piece(job, leaf, donor) for leaf, donor in zip(held, donors, strict=True)]


def _piece(job: Job, held: Held, donor: Piece | None) -> Piece:
    piece = cut(held, job.spec.start, job.spec.stop)
    if donor is not None:
        piece = completed(piece, donor, job.shared)
        if job.block is not None and len(donor.gap) <= len(piece.gap):
            return donor  # what is stored already is as good
    # A slice would keep the whole cache's buffer alive, and make the cache copy it at its next write.
    return replace(piece, arrays=tuple(mx.contiguous(array) for array in piece.arrays))


def is_better(pieces: Sequence[Piece], block: Block) -> bool:
    return sum(len(p.gap) for p in pieces) < sum(len(p.gap) for p in block.pieces)
