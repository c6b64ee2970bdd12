"""Drawing: from the logits of a pass to the next token of each row.

`Draws` keeps a batch's rows in the batch's order: their sampler, their processors, whether their clients want
log-probabilities. What it draws is put together lazily and computed with the pass: nothing is computed of the logits
that no row asks for. Used by `batch.py` and `decoding.py` on the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import mlx.core as mx

from omlxd.engine.prefill import Caches
from omlxd.engine.sampling import BatchSampler, Likely, LogitsProcessor, SamplerRow, likely


class RowFailed(Exception):
    """One row's processor or own forward pass raised; the cause says what."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


@dataclass(frozen=True, slots=True)
class RowStart:
    """A row about to join: its caches hold the KV of everything before `tokens`, which the model has yet to see.

    `tokens` is never empty; its last token is the one whose logits give the first draw. `num_likely` of the likeliest
    tokens come with each draw, and nothing for 0.
    """

    id: str
    caches: Caches
    tokens: Sequence[int]
    sampler: SamplerRow
    processors: list[LogitsProcessor]
    num_likely: int = 0


class RowToken(NamedTuple):
    """One row's next token; if its row wants them, the likeliest and their log-probabilities, still on the device."""

    id: str
    token_id: int
    likely: Likely | None


@dataclass(slots=True)
class Drawn:
    """The next tokens (rows,) of all rows, on the device and perhaps not computed yet."""

    tokens: mx.array
    likely: list[Likely | None]

    def begin(self) -> None:
        """Has them computed, and the pass that they come from."""
        wanted = [each for each in self.likely if each is not None]
        mx.async_eval(self.tokens, wanted)  # type: ignore[no-untyped-call]

    def told(self, ids: Sequence[str]) -> list[RowToken]:
        """Waits for them."""
        tokens = cast("list[int]", self.tokens.tolist())
        return list(map(RowToken, ids, tokens, self.likely))

    def extend(self, other: Drawn) -> None:
        self.tokens = mx.concatenate([self.tokens, other.tokens])
        self.likely = [*self.likely, *other.likely]

    def keep(self, indices: list[int]) -> None:
        self.tokens = self.tokens[mx.array(indices)]
        self.likely = [self.likely[index] for index in indices]


class Draws:
    """How each row of a batch draws. Its rows are in the batch's order."""

    def __init__(self, rows: Sequence[RowStart]) -> None:
        self.ids = [row.id for row in rows]
        self._sampler = BatchSampler([row.sampler for row in rows])
        self._processors = [row.processors for row in rows]
        self._num_likely = [row.num_likely for row in rows]
        self._looked_over()

    def _looked_over(self) -> None:
        self._any_processors = any(self._processors)
        self._any_likely = any(self._num_likely)

    def draw(self, logits: mx.array, newest: mx.array) -> Drawn:
        """From logits (rows, vocabulary), and each row's newest token (rows,). Raises RowFailed."""
        if self._any_processors:
            logits = mx.concatenate([*self._processed(logits, newest)])
        tokens = self._sampler(logits)
        if not self._any_likely:
            return Drawn(tokens, [None] * len(self.ids))
        wanted = enumerate(self._num_likely)
        return Drawn(tokens, [likely(logits[row], tokens[row], count) if count else None for row, count in wanted])

    def _processed(self, logits: mx.array, newest: mx.array) -> Iterable[mx.array]:
        for row, processors in enumerate(self._processors):
            own = logits[row : row + 1]
            try:
                for processor in processors:
                    own = processor(newest[row : row + 1], own)
            except Exception as exc:  # whatever it raises is the fault of this row and no other's
                raise RowFailed(self.ids[row]) from exc
            yield own

    def extend(self, other: Draws) -> None:
        self.ids = [*self.ids, *other.ids]
        self._sampler.extend(other._sampler.rows)
        self._processors = [*self._processors, *other._processors]
        self._num_likely = [*self._num_likely, *other._num_likely]
        self._looked_over()

    def keep(self, indices: Sequence[int]) -> None:
        self.ids = [self.ids[index] for index in indices]
        self._sampler.keep(indices)
        self._processors = [self._processors[index] for index in indices]
        self._num_likely = [self._num_likely[index] for index in indices]
        self._looked_over()
