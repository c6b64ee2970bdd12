"""Decoding: rows that get their next tokens from one forward pass, and the pass that is always under way.

mlx-lm's `GenerationBatch` does this too, on the same merged caches. This one computes log-probabilities for those rows
alone that want them, takes rows that join into the pass of all others instead of one of their own, and leaves to
the request what is the request's: when a row ends, and what has been said so far.

A pass is begun in two parts. While the device computes the first layers, the last pass's tokens are read and their
clients told; a pass that is begun as a whole may hold this thread until it is nearly over (mlx lets no more than ten
tasks wait), and then the device would stand idle while this thread has its turn. Used by `batch.py` on the engine
thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module

from omlxd.engine.drawing import Drawn, Draws, RowToken
from omlxd.engine.prefill import Caches

FIRST_PART = 1 / 4  # of the layers: time enough to tell the tokens, and little to wait for before they are told


class Decoding:
    """Rows, the caches that hold all of their tokens but the latest, and the latest, computed or under way."""

    def __init__(self, model: Module, draws: Draws, caches: Caches, first: Drawn) -> None:
        """`first` are the rows' first tokens, which have been told already."""
        self._model = model
        self._draws = draws
        self.caches = caches
        self._latest = first
        self._told = frozenset(draws.ids)  # whose latest token has been told
        self._logits: mx.array | None = None  # (rows, vocabulary) of a pass from which nothing has been drawn yet

    @property
    def ids(self) -> Sequence[str]:
        """The rows, in the order in which the caches have them."""
        return self._draws.ids

    def lacks(self, id: str) -> bool:
        """Whether the caches lack the latest token that was told of a row."""
        return id in self._told

    def step(self) -> list[RowToken]:
        """Begins the next pass and tells the tokens of the one before: of none of the rows that have just joined.

        `draw` is to follow. In between, rows can be removed and their caches read.
        """
        latest, told = self._latest, self._told
        self._logits = self._model(latest.tokens[:, None], cache=self.caches)[:, -1]
        self._told = frozenset()
        early = self.caches[int(len(self.caches) * FIRST_PART)]
        mx.async_eval(early.state)  # type: ignore[no-untyped-call]
        rows = latest.told(self.ids)
        return [row for row in rows if row.id not in told] if told else rows

    def draw(self) -> None:
        """Draws from the pass that `step` began, and has all of it computed. Raises RowFailed."""
        if self._logits is not None:
            logits, self._logits = self._logits, None
            self._latest = self._draws.draw(logits, self._latest.tokens)
            self._latest.begin()

    def extend(self, other: Decoding) -> None:
        """Takes all rows of another over; what is under way for both comes to its end."""
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            mine.extend(theirs)
        self._draws.extend(other._draws)
        self._latest.extend(other._latest)
        self._told |= other._told

    def remove(self, ids: frozenset[str]) -> bool:
        """Takes rows out; False if none is left, and then nothing of this can be used any more."""
        kept = [index for index, id in enumerate(self.ids) if id not in ids]
        if kept and len(kept) < len(self.ids):
            for cache in self.caches:
                cache.filter(kept)
            self._draws.keep(kept)
            self._latest.keep(kept)
            self._told -= ids
            if self._logits is not None:
                self._logits = self._logits[mx.array(kept)]
        return bool(kept)


def merged(rows: Sequence[Caches]) -> Caches:
    """The caches of several rows, layer by layer, as one with all of them."""
    return [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]
