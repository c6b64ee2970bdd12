"""Decoding: rows that get their next tokens from one forward pass, and the pass that is always under way.

mlx-lm's `GenerationBatch` does this too, on the same merged caches. This one computes log-probabilities for those rows
alone that want them, takes rows that join into the pass of all others instead of one of their own, and leaves to
the request what is the request's: when a row ends, and what has been said so far. Used by `batch.py` on the engine
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx.nn.layers.base import Module

from omlxd.engine.drawing import Drawn, Draws, RowStart, RowToken
from omlxd.engine.prefill import Caches


class Decoding:
    """Rows, the caches that hold all of their tokens but the latest, and the latest, computed or under way."""

    def __init__(self, model: Module, draws: Draws, caches: Caches, first: Drawn) -> None:
        """`first` are the rows' first tokens, which have been told already."""
        self._model = model
        self._draws = draws
        self.caches = caches
        self._latest = first
        self._told = frozenset(draws.ids)  # whose latest token has been told

    @property
    def ids(self) -> Sequence[str]:
        """The rows, in the order in which the caches have them."""
        return self._draws.ids

    def lacks(self, id: str) -> bool:
        """Whether the caches lack the latest token that was told of a row."""
        return id in self._told

    def step(self, meanwhile: Callable[[], None]) -> list[RowToken]:
        """Begins the next pass and tells the tokens of the one before: of none of the rows that have just joined.

        `meanwhile` is called when the pass is put together and this thread is about to wait: others can have the
        interpreter then. Raises RowFailed.
        """
        latest, told = self._latest, self._told
        logits = self._model(latest.tokens[:, None], cache=self.caches)[:, -1]
        meanwhile()
        self._latest, self._told = self._draws.draw(logits, latest.tokens), frozenset()
        self._latest.begin()
        rows = latest.told(self.ids)
        return [row for row in rows if row.id not in told] if told else rows

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
        return bool(kept)


def merged(rows: Sequence[RowStart]) -> Caches:
    """The rows' caches, layer by layer, as one with all of them."""
    return [layer[0].merge(list(layer)) for layer in zip(*(row.caches for row in rows), strict=True)]
