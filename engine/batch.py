"""The running batch: every row that is decoding, one token per row and step.

Two shapes of one protocol. `MergedBatch` is mlx-lm's `GenerationBatch`, rows merged into one cache; `InterleavedBatch`
keeps one cache per row and steps the rows one after another, for cache classes that cannot be merged. Both sample
through one `BatchSampler` with settings per row. Used on the engine thread only; only this file and `prefill.py` know
mlx-lm's batch classes. When a row ends is not decided here: stop ids and lengths are the request's business.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, StopSequences, generate_step
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache

from omlxd.engine.sampling import BatchSampler, LogitsProcessor, SamplerRow

# The batch never ends a row by itself: a number no answer reaches.
UNLIMITED = 1 << 62

Caches = list[Any]
Computed = Callable[[str, Caches], None]


class RowFailed(Exception):
    """One row's processor or own forward pass raised; the cause says what."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


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

    def join(self, rows: Sequence[RowStart], computed: Computed) -> None:
        """Runs the rows' remaining tokens and lets them decode from the next step on.

        `computed` is called for each row that had more than one token left, when all of them but the last have run.
        """
        ...

    def step(self) -> list[RowToken]:
        """The next token of every row, and starts computing the one after. Raises RowFailed for a row's own fault."""
        ...

    def caches(self, id: str) -> Caches:
        """A row's own caches, standing after the token that `step` returned last; to be read, and soon."""
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

    def join(self, rows: Sequence[RowStart], computed: Computed) -> None:
        sampler = BatchSampler([row.sampler for row in rows])
        prompts = PromptProcessingBatch(
            self._model,
            [row.id for row in rows],
            [row.caches for row in rows],
            # Only the tokens from here on: what came before is in the caches, and the processors count for themselves.
            tokens=[[] for _ in rows],
            # In one step: mlx-lm 0.32.2 loses count of a recurrent row's padding between two.
            prefill_step_size=max(len(row.tokens) for row in rows),
            samplers=[sampler] * len(rows),
            logits_processors=[_named(row.id, row.processors) for row in rows],
            stop_sequences=[StopSequences()] * len(rows),
            max_tokens=[UNLIMITED] * len(rows),
        )
        if any(len(row.tokens) > 1 for row in rows):
            prompts.prompt([list(row.tokens[:-1]) for row in rows])
            for index, row in enumerate(rows):
                computed(row.id, [row_of(cache, index) for cache in prompts.prompt_cache])
        joined = prompts.generate([[row.tokens[-1]] for row in rows])
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

    def caches(self, id: str) -> Caches:
        if self._running is None:
            raise KeyError(id)
        index = self._running.uids.index(id)
        return [row_of(cache, index) for cache in self._running.prompt_cache]

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
        self._caches: dict[str, Caches] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def join(self, rows: Sequence[RowStart], computed: Computed) -> None:
        for row in rows:
            if len(row.tokens) > 1:
                self._model(mx.array(list(row.tokens[:-1]))[None], cache=row.caches)
                mx.eval([cache.state for cache in row.caches])
                computed(row.id, row.caches)
            self._caches[row.id] = row.caches
            self._rows[row.id] = generate_step(
                mx.array([row.tokens[-1]]),
                self._model,
                # mlx-lm would switch to a stream of its own and leave it set between two tokens.
                mx.default_stream(mx.default_device()),
                max_tokens=-1,
                sampler=BatchSampler([row.sampler]),
                logits_processors=row.processors,
                prompt_cache=row.caches,
            )

    def step(self) -> list[RowToken]:
        tokens = []
        for id, row in self._rows.items():
            try:
                tokens.append(RowToken(id, *next(row)))
            except Exception as exc:
                raise RowFailed(id) from exc
        return tokens

    def caches(self, id: str) -> Caches:
        return self._caches[id]

    def remove(self, ids: frozenset[str]) -> None:
        for id in ids & self._rows.keys():
            self._rows.pop(id).close()
            del self._caches[id]


def row_of(cache: Any, index: int) -> Any:
    """One row's cache out of a merged one.

    Full attention is handed out as a view: mlx-lm's `extract` would copy the whole row to keep its last block.
    """
    if type(cache) is CacheList:
        return CacheList(*(row_of(leaf, index) for leaf in cache.caches))
    if type(cache) is BatchKVCache:
        keys, values, _, left_padding, stop = cache.state
        start = int(left_padding[index].item())
        rows = slice(index, index + 1), slice(None), slice(start, stop)
        return KVCache.from_state((keys[rows], values[rows], stop - start))
    return cache.extract(index)


def _named(id: str, processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    """The processors, with their failures told as this row's."""

    def name(processor: LogitsProcessor) -> LogitsProcessor:
        def call(tokens: mx.array, logits: mx.array) -> mx.array:
            try:
                return processor(tokens, logits)
            except Exception as exc:
                raise RowFailed(id) from exc

        return call

    return [name(processor) for processor in processors]
