"""The running batch: every row that is decoding, one token per row and step.

Two shapes of one protocol. `MergedBatch` is mlx-lm's `GenerationBatch`, rows merged into one cache; `InterleavedBatch`
keeps one cache per row and steps the rows one after another, for cache classes that cannot be merged. Both sample
through one `BatchSampler` with settings per row. A row's first token is drawn as it joins (`joining.py`) and is there
before the pass for its second one begins. Used on the engine thread only; with `joining.py` and `prefill.py` the only
file that knows mlx-lm's batch classes. When a row ends is not decided here: stop ids and lengths are the request's.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, StopSequences, generate_step

from omlxd.engine.joining import (
    Caches,
    Computed,
    RowFailed,
    RowStart,
    RowToken,
    draw,
    named,
    row_of,
    run_alone,
    run_together,
)
from omlxd.engine.sampling import BatchSampler

# The batch never ends a row by itself: a number no answer reaches.
UNLIMITED = 1 << 62


class Batch(Protocol):
    """Rows that decode together."""

    def join(self, rows: Sequence[RowStart], computed: Computed) -> list[RowToken]:
        """Runs the rows' remaining tokens and draws each one's next; they decode from the next step on.

        `computed` is called for each row that had more than one token left, with how many of them the caches that it
        is given lack: none, or the last one. Raises RowFailed for a row's own fault.
        """
        ...

    def step(self) -> list[RowToken]:
        """The next token of every row, and starts computing the one after. Raises RowFailed for a row's own fault."""
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


@dataclass(slots=True)
class _Entering:
    """Rows whose first tokens have been drawn and are in nobody's cache yet."""

    prompts: PromptProcessingBatch
    tokens: list[int]
    sampler: BatchSampler

    def remove(self, ids: frozenset[str]) -> bool:
        """Takes rows out; False if none is left."""
        kept = [i for i, uid in enumerate(self.prompts.uids) if uid not in ids]
        if kept and len(kept) < len(self.tokens):
            self.prompts.filter(kept)
            self.sampler.keep(kept)
            self.tokens = [self.tokens[i] for i in kept]
        return bool(kept)


class MergedBatch:
    """Rows in one merged cache, computed in one forward pass."""

    def __init__(self, model: Module, *, last_apart: bool) -> None:
        """`last_apart`: `computed` is to see every prompt without its last token: a checkpoint belongs there."""
        self._model = model
        self._last_apart = last_apart
        self._sampler = BatchSampler()  # of the rows that run
        self._running: GenerationBatch | None = None
        self._entering: _Entering | None = None

    def join(self, rows: Sequence[RowStart], computed: Computed) -> list[RowToken]:
        self._enter()
        sampler = BatchSampler([row.sampler for row in rows])
        if len(rows) == 1:
            # On its own caches: the copy into a merged one is not on the way to the first token.
            logits = run_alone(self._model, rows[0], computed, last_apart=self._last_apart)
            prompts = self._prompts(rows, sampler)
        else:
            prompts = self._prompts(rows, sampler)
            logits = run_together(self._model, rows, prompts.prompt_cache, computed, last_apart=self._last_apart)
        drawn = draw(rows, logits, sampler)
        self._entering = _Entering(prompts, [row.token_id for row in drawn], sampler)
        return drawn

    def _prompts(self, rows: Sequence[RowStart], sampler: BatchSampler) -> PromptProcessingBatch:
        return PromptProcessingBatch(
            self._model,
            [row.id for row in rows],
            [row.caches for row in rows],
            # Only the tokens from here on: what came before is in the caches, and the processors count for themselves.
            tokens=[[] for _ in rows],
            samplers=[sampler] * len(rows),
            logits_processors=[named(row) for row in rows],
            stop_sequences=[StopSequences()] * len(rows),
            max_tokens=[UNLIMITED] * len(rows),
        )

    def _enter(self) -> None:
        """Begins the pass of the rows that joined last, and lets them run with the others."""
        if self._entering is None:
            return
        entering, self._entering = self._entering, None
        joined = entering.prompts.generate([[token] for token in entering.tokens])
        if self._running is None:
            self._running, self._sampler = joined, entering.sampler
            return
        self._running.extend(joined)
        self._sampler.extend(entering.sampler.rows)
        self._running.samplers = [self._sampler] * len(self._sampler.rows)

    def step(self) -> list[RowToken]:
        self._enter()
        if self._running is None:
            return []
        return [RowToken(r.uid, r.token, r.logprobs) for r in self._running.next()]

    def caches(self, id: str) -> tuple[Caches, int]:
        if self._entering is not None and id in self._entering.prompts.uids:
            return _row(self._entering.prompts, id), 1
        if self._running is None:
            raise KeyError(id)
        return _row(self._running, id), 0

    def remove(self, ids: frozenset[str]) -> None:
        if self._entering is not None and not self._entering.remove(ids):
            self._entering = None
        if self._running is None:
            return
        keep = [i for i, uid in enumerate(self._running.uids) if uid not in ids]
        if len(keep) == len(self._running.uids):
            return
        if not keep:
            self._running, self._sampler = None, BatchSampler()
            return
        self._running.filter(keep)
        self._sampler.keep(keep)

    def close(self) -> None:
        self._running, self._entering, self._sampler = None, None, BatchSampler()


def _row(batch: GenerationBatch | PromptProcessingBatch, id: str) -> Caches:
    index = batch.uids.index(id)
    return [row_of(cache, index) for cache in batch.prompt_cache]


class InterleavedBatch:
    """Rows with a cache each, stepped one after another."""

    def __init__(self, model: Module, *, last_apart: bool) -> None:
        """`last_apart` as in `MergedBatch`."""
        self._model = model
        self._last_apart = last_apart
        self._rows: dict[str, Generator[tuple[int, mx.array], None, None]] = {}
        self._caches: dict[str, Caches] = {}
        self._entering: set[str] = set()  # joined since the last step

    def join(self, rows: Sequence[RowStart], computed: Computed) -> list[RowToken]:
        return [self._join(row, computed) for row in rows]

    def _join(self, row: RowStart, computed: Computed) -> RowToken:
        sampler = BatchSampler([row.sampler])
        logits = run_alone(self._model, row, computed, last_apart=self._last_apart)
        (drawn,) = draw([row], logits, sampler)
        self._caches[row.id] = row.caches
        self._entering.add(row.id)
        self._rows[row.id] = generate_step(
            mx.array([drawn.token_id]),
            self._model,
            # mlx-lm would switch to a stream of its own and leave it set between two tokens.
            mx.default_stream(mx.default_device()),
            max_tokens=-1,
            sampler=sampler,
            logits_processors=row.processors,
            prompt_cache=row.caches,
        )
        return drawn

    def step(self) -> list[RowToken]:
        tokens = []
        self._entering.clear()
        for id, row in self._rows.items():
            try:
                tokens.append(RowToken(id, *next(row)))
            except Exception as exc:  # a row with a cache of its own fails alone, whatever the model raised
                raise RowFailed(id) from exc
        return tokens

    def caches(self, id: str) -> tuple[Caches, int]:
        return self._caches[id], int(id in self._entering)

    def remove(self, ids: frozenset[str]) -> None:
        for id in ids & self._rows.keys():
            self._rows.pop(id).close()
            del self._caches[id]
            self._entering.discard(id)

    def close(self) -> None:
        # Here and now: mlx-lm's generators can be ended by the thread that began them alone.
        self.remove(frozenset(self._rows))
