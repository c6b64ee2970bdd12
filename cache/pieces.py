"""A block's pieces: for each sliceable leaf, the rows it keeps of the block's tokens.

Pure functions over mlx arrays, on the engine thread; everything returned is lazy. A full-attention leaf always keeps
all rows. A window leaf keeps what was still there when the block was cut: usually all, but only the last rows when
they come from a row of a decoding batch, whose ring has turned since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from omlxd.cache.layouts import Held, Needs


@dataclass(frozen=True, slots=True)
class Piece:
    """The first `head` and the last `tail` rows of a block of `num_tokens`, joined on axis -2.

    A piece that has all of them has head 0.
    """

    arrays: tuple[mx.array, ...]
    num_tokens: int
    head: int
    tail: int

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    @property
    def gap(self) -> range:
        """The block's tokens, counted from its start, whose rows are missing."""
        return range(self.head, self.num_tokens - self.tail)


def cut(held: Held, start: int, stop: int) -> Piece:
    """The rows of tokens [start, stop) that are held; stop <= held.stop."""
    num_tokens = stop - start
    tail = min(num_tokens, max(0, stop - max(start, held.first)))
    head = min(num_tokens - tail, max(0, held.sink - start))
    if head + tail == num_tokens and head:  # the sink ends where the rest begins: one run of rows
        return Piece(tuple(_rows(array, start, stop) for array in held.arrays), num_tokens, 0, num_tokens)
    last = held.sink + stop - held.first if tail else 0
    if not head:
        return Piece(tuple(_rows(array, last - tail, last) for array in held.arrays), num_tokens, 0, tail)
    arrays = tuple(_joined([_rows(a, start, start + head), _rows(a, last - tail, last)]) for a in held.arrays)
    return Piece(arrays, num_tokens, head, tail)


def select(piece: Piece, start: int, stop: int) -> tuple[mx.array, ...]:
    """The rows of the block's tokens [start, stop), none of which is in the gap."""
    if start == 0 and stop == piece.num_tokens and not piece.gap:
        return piece.arrays
    shift = 0 if stop <= piece.head else len(piece.gap)
    return tuple(_rows(array, start - shift, stop - shift) for array in piece.arrays)


def completed(piece: Piece, donor: Piece, shared: int) -> Piece:
    """`piece` with its gap filled from a block that starts with the same `shared` tokens, if that one can."""
    gap = piece.gap
    if not gap or gap.stop > shared or _overlap(donor.gap, gap):
        return piece
    filled = select(donor, gap.start, gap.stop)
    before, after = select(piece, 0, gap.start), select(piece, gap.stop, piece.num_tokens)
    arrays = tuple(_joined(list(rows)) for rows in zip(before, filled, after, strict=True))
    return Piece(arrays, piece.num_tokens, 0, piece.num_tokens)


def conflict(gap: range, needs: Needs, position: int) -> bool:
    """Whether a leaf that goes on at `position` needs a token of this gap (in positions of the sequence)."""
    if not gap or gap.start >= position:
        return False
    return gap.start < needs.sink or max(gap.start, needs.first) < min(gap.stop, position)


def join(blocks: Sequence[tuple[int, Piece]], needs: Needs, position: int) -> tuple[mx.array, ...]:
    """The rows of the needed tokens below `position`, in order, and spare ones.

    `blocks` are (start, piece) of a chain from token 0.
    """
    parts: list[tuple[mx.array, ...]] = []
    for first, stop in ((0, min(needs.sink, needs.first)), (needs.first, position)):
        for start, piece in blocks:
            low, high = max(first, start), min(stop, start + piece.num_tokens)
            if low < high:
                parts.append(select(piece, low - start, high - start))
    if needs.spare:
        parts.append(tuple(_empty(array, needs.spare) for array in parts[0]))
    return tuple(_joined(list(arrays)) for arrays in zip(*parts, strict=True))


def _empty(like: mx.array, rows: int) -> mx.array:
    return mx.zeros((*like.shape[:-2], rows, like.shape[-1]), like.dtype)


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _rows(array: mx.array, start: int, stop: int) -> mx.array:
    return array[..., start:stop, :]


def _joined(arrays: list[mx.array]) -> mx.array:
    """A handle of its own, never one of `arrays`: a cache writes through its handle, and a block must not see that."""
    present = [array for array in arrays if array.shape[-2]] or arrays[:1]
    return mx.concatenate(present, axis=-2)
