"""The running batch: every row that is decoding, one token per row and step.

Two shapes of one protocol. `MergedBatch` is mlx-lm's `GenerationBatch`, rows merged into one cache; `InterleavedBatch`
keeps one cache per row and steps the rows one after another, for cache classes that cannot be merged. Both sample
through one `BatchSampler` with settings per row. Used on the engine thread only; only this file and `prefill.py` know
mlx-lm's batch classes. When a row ends is not decided here: stop ids and lengths are the request's business.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, StopSequences, generate_step

from omlxd.engine.sampling import BatchSampler, LogitsProcessor, SamplerRow

# The batch never ends a row by itself: a number no answer reaches.
UNLIMITED = 1 << 62

Caches = list[Any]


@dataclass(frozen=True, slots=True)
class RowStart:
    """A row about to join: its caches hold the KV of everything before `tokens`, which the model has yet to see.

    `tokens` is never empty; its last token is the one whose logits give the first draw.
    """

    id: str
    caches: Caches
    tokens: Sequence[int]
    sampler: SamplerRow
    processors: list[LogitsProcessor]


@dataclass(frozen=True, slots=True)
class RowToken:
    """One row's next token, with the log-probabilities (vocabulary,) it was drawn from, still on the device."""

    id: str
    token_id: int
    logprobs: mx.array


class Batch(Protocol):
    """Rows that decode together."""

    def __len__(self) -> int: ...

    def join(self, rows: Sequence[RowStart]) -> None:
        """Runs the rows' remaining tokens and lets them decode from the next step on."""
        ...

    def step(self) -> list[RowToken]:
        """The next token of every row, and starts computing the one after."""
        ...

    def remove(self, ids: frozenset[str]) -> None:
        """Takes rows out; their memory goes with them."""
        ...


class MergedBatch:
    """Rows in one merged cache, computed in one forward pass."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._sampler = BatchSampler()
        self._running: GenerationBatch | None = None

    def __len__(self) -> int:
        return len(self._sampler.rows)

    def join(self, rows: Sequence[RowStart]) -> None:
        sampler = BatchSampler([row.sampler for row in rows])
        prompts = PromptProcessingBatch(
            self._model,
            [row.id for row in rows],
            [row.caches for row in rows],
            # Only the tokens from here on: what came before is in the caches, and the processors count for themselves.
            tokens=[[] for _ in rows],
            samplers=[sampler] * len(rows),
            logits_processors=[row.processors for row in rows],
            stop_sequences=[StopSequences()] * len(rows),
            max_tokens=[UNLIMITED] * len(rows),
        )
        joined = prompts.generate([list(row.tokens) for row in rows])
        if self._running is None:
            self._running, self._sampler = joined, sampler
            return
        self._running.extend(joined)
        self._sampler.extend(sampler.rows)
        self._running.samplers = [self._sampler] * len(self._sampler.rows)

    def step(self) -> list[RowToken]:
        if self._running is None:
            return []
        return [RowToken(r.uid, r.token, r.logprobs) for r in self._running.next()]

    def remove(self, ids: frozenset[str]) -> None:
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


class InterleavedBatch:
    """Rows with a cache each, stepped one after another."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._rows: dict[str, Generator[tuple[int, mx.array], None, None]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, rows: Sequence[RowStart]) -> None:
        for row in rows:
            self._rows[row.id] = generate_step(
                mx.array(list(row.tokens)),
                self._model,
                # mlx-lm would switch to a stream of its own and leave it set between two tokens.
                mx.default_stream(mx.default_device()),
                max_tokens=-1,
                sampler=BatchSampler([row.sampler]),
                logits_processors=row.processors,
                prompt_cache=row.caches,
            )

    def step(self) -> list[RowToken]:
        return [RowToken(id, *next(row)) for id, row in self._rows.items()]

    def remove(self, ids: frozenset[str]) -> None:
        for id in ids & self._rows.keys():
            self._rows.pop(id).close()
