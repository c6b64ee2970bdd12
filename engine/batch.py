"""The running batch: every row that is decoding, one token per row and step.

Two shapes of one protocol. `MergedBatch` merges the rows' caches into one, by mlx-lm's batch classes of caches, and has
one forward pass for all; `InterleavedBatch` keeps one cache per row and steps the rows one after another, for cache
classes that cannot be merged. A row's first token is drawn as it joins (`joining.py`) and is there before the pass for
its second one begins. Used on the engine thread only. When a row ends is not decided here: stop ids and lengths are
the request's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import mlx.core as mx
from mlx.nn.layers.base import Module

from omlxd.engine.decoding import Decoding, merged
from omlxd.engine.drawing import Drawn, Draws, RowFailed, RowStart, RowToken
from omlxd.engine.joining import Computed, row_of, run_alone, run_together
from omlxd.engine.prefill import Caches

T = TypeVar("T")


class Batch(Protocol):
    """Rows that decode together."""

    def join(self, rows: Sequence[RowStart], computed: Computed) -> list[RowToken]:
        """Runs the rows' remaining tokens and draws each one's next; they decode from the next step on.

        `computed` is called for each row that had more than one token left, with how many of them the caches that it
        is given lack: none, or the last one. Raises RowFailed for a row's own fault.
        """
        ...

    def step(self) -> list[RowToken]:
        """Begins the next pass for every row and tells the tokens of the one before.

        A row that has joined since the last step is in it for the first time: its second token comes with the next
        step. `draw` is to follow; rows that end with these tokens are best removed before. Raises RowFailed for a
        row's own fault.
        """
        ...

    def draw(self) -> None:
        """Draws each row's next token from the pass that `step` began, for the next `step` to tell.

        Raises RowFailed for a row's own fault.
        """
        ...

    def caches(self, id: str) -> tuple[Caches, int]:
        """A row's own caches, to be read, and soon; and how many of its tokens they lack.

        None, or one, from the draw at its joining until the next step.
        """
        ...

    def remove(self, ids: frozenset[str]) -> None:
        """Takes rows out; their memory goes with them."""
        ...

    def close(self) -> None:
        """Takes every row out, in whatever state a failure has left them."""
        ...


@dataclass(frozen=True, slots=True)
class _Entered:
    """A row that has joined on caches of its own, and drawn its first token."""

    draws: Draws
    caches: Caches
    first: Drawn

    @property
    def id(self) -> str:
        return self.draws.ids[0]


class MergedBatch:
    """Rows in one merged cache, computed in one forward pass."""

    def __init__(self, model: Module, *, last_apart: bool) -> None:
        """`last_apart`: `computed` is to see every prompt without its last token: a checkpoint belongs there."""
        self._model = model
        self._last_apart = last_apart
        self._running: Decoding | None = None
        # Joined since the last step: those that joined together, and those that joined alone.
        self._entering: Decoding | None = None
        self._entered: list[_Entered] = []

    def join(self, rows: Sequence[RowStart], computed: Computed) -> list[RowToken]:
        draws = Draws(rows)
        if len(rows) == 1:
            # On its own caches: the copy into a merged one is not on the way to the first token.
            logits = run_alone(self._model, rows[0], computed, last_apart=self._last_apart)
            first = draws.draw(logits, _newest(rows))
            self._entered.append(_Entered(draws, rows[0].caches, first))
        else:
            caches = merged([row.caches for row in rows])
            logits = run_together(self._model, rows, caches, computed, last_apart=self._last_apart)
            first = draws.draw(logits, _newest(rows))
            self._entering = _extended(self._entering, Decoding(self._model, draws, caches, first))
        return first.told(draws.ids)

    def _enter(self) -> None:
        """Lets the rows that have joined since the last step run with the others: each is copied once."""
        if self._entered:
            rows, self._entered = self._entered, []
            caches, draws, first = merged([row.caches for row in rows]), rows[0].draws, rows[0].first
            for row in rows[1:]:
                draws.extend(row.draws)
                first.extend(row.first)
            self._entering = _extended(self._entering, Decoding(self._model, draws, caches, first))
        if self._entering is not None:
            self._running, self._entering = _extended(self._running, self._entering), None

    def step(self) -> list[RowToken]:
        self._enter()
        return [] if self._running is None else self._running.step()

    def draw(self) -> None:
        if self._running is not None:
            self._running.draw()

    def caches(self, id: str) -> tuple[Caches, int]:
        for row in self._entered:
            if row.id == id:
                return row.caches, 1
        for rows in (self._entering, self._running):
            if rows is not None and id in rows.ids:
                index = rows.ids.index(id)
                return [row_of(cache, index) for cache in rows.caches], int(rows.lacks(id))
        raise KeyError(id)

    def remove(self, ids: frozenset[str]) -> None:
        self._entered = [row for row in self._entered if row.id not in ids]
        if self._entering is not None and not self._entering.remove(ids):
            self._entering = None
        if self._running is not None and not self._running.remove(ids):
            self._running = None

    def close(self) -> None:
        self._running, self._entering, self._entered = None, None, []


def _extended(rows: Decoding | None, others: Decoding) -> Decoding:
    if rows is None:
        return others
    rows.extend(others)
    return rows


class InterleavedBatch:
    """Rows with a cache each, stepped one after another."""

    def __init__(self, model: Module, *, last_apart: bool) -> None:
        """`last_apart` as in `MergedBatch`."""
        self._model = model
        self._last_apart = last_apart
        self._rows: dict[str, Decoding] = {}

    def join(self, rows: Sequence[RowStart], computed: Computed) -> list[RowToken]:
        return [self._join(row, computed) for row in rows]

    def _join(self, row: RowStart, computed: Computed) -> RowToken:
        draws = Draws([row])
        logits = run_alone(self._model, row, computed, last_apart=self._last_apart)
        first = draws.draw(logits, _newest([row]))
        (told,) = first.told(draws.ids)
        self._rows[row.id] = Decoding(self._model, draws, row.caches, first)
        return told

    def step(self) -> list[RowToken]:
        return [token for id, row in self._rows.items() for token in _of_row(id, row.step)]

    def draw(self) -> None:
        for id, row in self._rows.items():
            _of_row(id, row.draw)

    def caches(self, id: str) -> tuple[Caches, int]:
        row = self._rows[id]
        return row.caches, int(row.lacks(id))

    def remove(self, ids: frozenset[str]) -> None:
        for id in ids & self._rows.keys():
            del self._rows[id]

    def close(self) -> None:
        self._rows.clear()


def _newest(rows: Sequence[RowStart]) -> mx.array:
    return mx.array([row.tokens[-1] for row in rows])


def _of_row(id: str, step: Callable[[], T]) -> T:
    """A row with a cache of its own fails alone, whatever the model raised."""
    try:
        return step()
    except RowFailed:
        raise
    except Exception as exc:  # it concerns no other row's cache
        raise RowFailed(id) from exc
