"""Sampling: how each row of a batch draws its next token from the logits.

One `BatchSampler` serves a whole batch in one call, with settings and a PRNG key per row: a row's draw depends on its
seed, on how many tokens it has and on its own logits, never on its neighbours. `Penalties` and `bias_processor` change
one row's logits before that. Used on the engine thread; holds small arrays made there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import mlx.core as mx

from omlxd.engine.sampling_settings import SamplingSettings

# The newest token (1,) and the row's logits (1, vocabulary): other logits.
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Likely = tuple[mx.array, mx.array]  # ids and log-probabilities (1 + count,): the drawn token's, and the likeliest ones'

_MASK64 = (1 << 64) - 1
# Beyond these a setting changes no draw any more, and infinities and NaN would take the place of the logits: the
# narrowest type that logits come in is float16.
_INVERSE_TEMPERATURES = (1e-30, 1e30)
_REPETITION_PENALTIES = (1e-4, 1e4)
_MAX_TOP_K = (1 << 31) - 1
_LEAST_LOGPROB = -float(mx.finfo(mx.float32).max)  # of a token that cannot be: JSON has no infinity


def row_key(seed: int, index: int, purpose: int = 0) -> list[int]:
    """The PRNG key, as two uint32, for the draw of a row's token `index`: splitmix64's finaliser over seed and index.

    Computed, not split from the key before it, so that a row which left the batch and came back goes on as if it had
    stayed.
    """
    x = (seed + (2 * index + purpose + 1) * 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    x ^= x >> 31
    return [x >> 32, x & 0xFFFFFFFF]


def normalised(logits: mx.array) -> mx.array:
    """Log-probabilities, of logits (..., vocabulary)."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class SamplerRow:
    """One row's settings and the index of the token it draws next."""

    __slots__ = ("index", "settings")

    def __init__(self, settings: SamplingSettings, index: int = 0) -> None:
        self.settings = settings
        self.index = index


class BatchSampler:
    """Draws one token for every row of a batch. Its rows are in the batch's order; `Draws` keeps them so."""

    def __init__(self, rows: Sequence[SamplerRow] = ()) -> None:
        self._rows: list[SamplerRow] = []
        self.extend(rows)

    @property
    def rows(self) -> Sequence[SamplerRow]:
        return self._rows

    def extend(self, rows: Sequence[SamplerRow]) -> None:
        self._rows = [*self._rows, *rows]
        self._columns = _Columns([row.settings for row in self._rows])

    def keep(self, indices: Sequence[int]) -> None:
        self._rows = [self._rows[i] for i in indices]
        self._columns = _Columns([row.settings for row in self._rows])

    def __call__(self, logits: mx.array) -> mx.array:
        """Token ids (rows,) for logits (rows, vocabulary)."""
        indices = [row.index for row in self._rows]
        for row in self._rows:
            row.index += 1
        columns = self._columns
        # Of the logits themselves, whatever the other rows want: normalised, two in a narrow type may become one.
        greedy = mx.argmax(logits, axis=-1)
        if columns.all_greedy:
            return greedy
        seeds = [row.settings.seed for row in self._rows]
        left = columns.filter(normalised(logits))
        if columns.any_xtc:
            left = columns.exclude_top_choices(left, _keys(seeds, indices, purpose=1))
        drawn = _draw(left * columns.inverse_temperature, _keys(seeds, indices))
        return mx.where(columns.greedy, greedy, drawn)


def _keys(seeds: Sequence[int], indices: Sequence[int], purpose: int = 0) -> mx.array:
    keys = [row_key(seed, index, purpose) for seed, index in zip(seeds, indices, strict=True)]
    return mx.array(keys, dtype=mx.uint32)


_draw = mx.vmap(lambda logits, key: mx.random.categorical(logits, key=key))
_uniform = mx.vmap(lambda key: mx.random.uniform(key=key))


class _Columns:
    """The rows' settings as columns (rows, 1), built once per change of the batch."""

    def __init__(self, rows: Sequence[SamplingSettings]) -> None:
        self.all_greedy = all(row.temperature == 0 for row in rows)
        self.any_xtc = any(row.xtc_probability > 0 for row in rows)
        self._any_rank = any(row.top_k > 0 or row.top_p < 1 for row in rows)
        self._any_min_p = any(row.min_p > 0 for row in rows)
        if self.all_greedy:
            return
        self.greedy = mx.array([row.temperature == 0 for row in rows])
        self.inverse_temperature = _column([_inverse(row.temperature) for row in rows])
        self._top_p = _column([row.top_p if row.top_p < 1 else math.inf for row in rows])
        self._top_k = mx.array([[min(row.top_k, _MAX_TOP_K)] for row in rows])
        self._min_p_gap = _column([math.log(row.min_p) if row.min_p > 0 else -math.inf for row in rows])
        self._xtc_probability = _column([row.xtc_probability for row in rows])
        self._xtc_threshold = _column([row.xtc_threshold for row in rows])

    def filter(self, logprobs: mx.array) -> mx.array:
        """Top-k, top-p and min-p as one threshold per row: what lies below it becomes -inf. The best token stays."""
        threshold = None
        if self._any_rank:
            threshold = self._rank_threshold(logprobs)
        if self._any_min_p:
            floor = logprobs.max(axis=-1, keepdims=True) + self._min_p_gap
            threshold = floor if threshold is None else mx.maximum(threshold, floor)
        return logprobs if threshold is None else mx.where(logprobs < threshold, -mx.inf, logprobs)

    def _rank_threshold(self, logprobs: mx.array) -> mx.array:
        vocabulary = logprobs.shape[-1]
        ordered = mx.sort(logprobs, axis=-1)[:, ::-1]
        mass = mx.cumsum(mx.exp(ordered.astype(mx.float32)), axis=-1, inclusive=False)
        # A token stays while the mass before it has not reached top_p: the first one always does.
        kept_by_p = mx.maximum((mass < self._top_p).sum(axis=-1, keepdims=True), 1)
        kept_by_k = mx.where(self._top_k > 0, mx.minimum(self._top_k, vocabulary), vocabulary)
        return mx.take_along_axis(ordered, mx.minimum(kept_by_p, kept_by_k) - 1, axis=-1)

    def exclude_top_choices(self, logits: mx.array, keys: mx.array) -> mx.array:
        """XTC: with the row's probability, drop every token above the threshold except the least likely of them."""
        probs = mx.softmax(logits, axis=-1)
        above = probs > self._xtc_threshold
        least = mx.where(above, probs, mx.inf).min(axis=-1, keepdims=True)
        dropped = above & (probs > least) & (_uniform(keys)[:, None] < self._xtc_probability)
        return mx.where(dropped, -mx.inf, logits)


def _inverse(temperature: float) -> float:
    least, most = _INVERSE_TEMPERATURES
    return min(max(1 / temperature, least), most) if temperature else 1.0


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


class Penalties:
    """Repetition, presence and frequency penalties of one row, as a logits processor.

    Repetition divides positive and multiplies negative logits of every token of prompt and answer; presence and
    frequency subtract for tokens of the answer only. Counts per token are kept on the device and grow by the newest
    token at each call, so a step costs the same however long the sequence is. The first call's token still belongs
    to the prompt, unless an answer has begun.
    """

    def __init__(
        self, settings: SamplingSettings, *, prompt: Sequence[int], answer: Sequence[int] | None, vocab_size: int
    ) -> None:
        self._settings = settings
        least, most = _REPETITION_PENALTIES
        self._repetition = min(max(settings.repetition_penalty, least), most)
        self._seen = _counts([*prompt, *(answer or ())], vocab_size)
        self._answer = _counts(answer or (), vocab_size)
        self._prompt_ends = answer is None

    def __call__(self, newest: mx.array, logits: mx.array) -> mx.array:
        self._seen = self._seen.at[newest].add(1)
        if not self._prompt_ends:
            self._answer = self._answer.at[newest].add(1)
        self._prompt_ends = False
        settings = self._settings
        if self._repetition != 1.0:
            penalised = mx.where(logits > 0, logits / self._repetition, logits * self._repetition)
            logits = mx.where(self._seen > 0, penalised, logits)
        if settings.presence_penalty or settings.frequency_penalty:
            present = (self._answer > 0).astype(logits.dtype)
            counted = self._answer.astype(logits.dtype)
            logits = logits - settings.presence_penalty * present - settings.frequency_penalty * counted
        largest = _largest(logits)
        return mx.clip(logits, -largest, largest)


def _counts(token_ids: Sequence[int], vocab_size: int) -> mx.array:
    counts = mx.zeros(vocab_size, dtype=mx.int32)
    return counts.at[mx.array(list(token_ids))].add(1) if token_ids else counts


def _largest(logits: mx.array) -> float:
    """The largest logit that a client can bring about: two of them still add up to a finite number."""
    return float(mx.finfo(logits.dtype).max) / 4


def bias_processor(bias: Mapping[int, float]) -> LogitsProcessor:
    """Adds each bias to its token's logit. Minus infinity bans a token; any other is cut to what stays finite."""
    ids, values = mx.array(list(bias)), mx.array(list(bias.values()), dtype=mx.float32)
    banned = mx.array([value == -math.inf for value in bias.values()])

    def add(_tokens: mx.array, logits: mx.array) -> mx.array:
        largest = _largest(logits)
        finite = mx.where(banned, -mx.inf, mx.clip(values, -largest, largest))
        return logits.at[:, ids].add(finite.astype(logits.dtype))

    return add


def processors(
    settings: SamplingSettings,
    bias: Mapping[int, float],
    *,
    prompt: Sequence[int],
    answer: Sequence[int] | None = None,
    vocab_size: int,
) -> list[LogitsProcessor]:
    """The processors one row needs, in order; none for a plain request.

    The newest token comes with the first call, so it is in neither: of an answer that has begun `answer` is
    without its last token; before that it is None and `prompt` is without its last.
    """
    chain: list[LogitsProcessor] = []
    if settings.repetition_penalty != 1.0 or settings.presence_penalty or settings.frequency_penalty:
        chain.append(Penalties(settings, prompt=prompt, answer=answer, vocab_size=vocab_size))
    if bias:
        chain.append(bias_processor(bias))
    return chain


def likely(logits: mx.array, token_id: mx.array, count: int) -> Likely:
    """Of one row's logits (vocabulary,): the ids and log-probabilities of the drawn token and of the `count` best."""
    logprobs = normalised(logits)
    best = mx.argsort(-logprobs)[:count]
    ids = mx.concatenate([token_id[None], best])
    return ids, logprobs[ids]


def read_likely(row: Likely) -> list[tuple[int, float]]:
    """What `likely` found, the drawn token first, once it is computed.

    All numbers are finite: a token that was banned has the least that there is.
    """
    ids, values = cast("list[int]", row[0].tolist()), cast("list[float]", row[1].tolist())
    return [(id, max(value, _LEAST_LOGPROB)) for id, value in zip(ids, values, strict=True)]
