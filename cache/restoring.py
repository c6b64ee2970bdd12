"""Restoring: from a match in the prefix tree to caches that stand where it ends.

Requests that begin together with the same prefix get caches of their own, whose arrays are the same until one of them
writes: mlx copies an array on writing if others have it. On the model's engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from omlxd.cache.entries import Match
from omlxd.cache.layouts import Leaf, ModelLayout
from omlxd.cache.pieces import join

Rows = Sequence[Sequence[mx.array]]


@dataclass(frozen=True, slots=True)
class _Joined:
    """The evaluated rows of one prefix: `keys` are its blocks'."""

    keys: Sequence[bytes]
    position: int
    rows: Rows


class Restoring:
    """Makes one model's caches."""

    def __init__(self, layout: ModelLayout) -> None:
        self._layout = layout
        self._shares = False
        self._latest: _Joined | None = None

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Inside, the latest prefix is kept at hand: who begins with the same one costs nothing."""
        self._shares = True
        try:
            yield
        finally:
            self._shares, self._latest = False, None

    def caches(self, match: Match) -> list[Leaf]:
        """Caches that hold the match's tokens, the caller's own: nothing done to them reaches anybody else."""
        caches = self._layout.fresh()
        if match.position == 0:
            return caches
        states = match.checkpoint.states if match.checkpoint else []
        # A cache writes through its handles: each has its own.
        rows = [[array[...] for array in arrays] for arrays in self._rows(match)]
        self._layout.fill(caches, rows, states, match.position)
        return caches

    def _rows(self, match: Match) -> Rows:
        keys = [block.spec.key for block in match.blocks]
        latest = self._latest
        if latest is not None and latest.position == match.position and latest.keys == keys:
            return latest.rows
        rows = []
        for index, needs in enumerate(self._layout.needs(match.position)):
            pieces = [(block.spec.start, block.pieces[index]) for block in match.blocks]
            rows.append(join(pieces, needs, match.position))
        mx.eval(rows)
        if self._shares:
            self._latest = _Joined(keys, match.position, rows)
        return rows
