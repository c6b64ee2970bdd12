"""What work will need of memory, before it is done: caches by their layout, a prefill turn by the model's widths.

Pure arithmetic, and one running correction by what turns really took. Used on the model's engine thread. Bytes for one
row unless said otherwise; `engine/kv_cost.py` reads a model's leaves, `engine/widths.py` its widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ROWS_PER_STEP = 256  # the libraries' caches grow by so many rows at a time

# A measured turn corrects the forecast by its ratio to it. One reading may say at most so much, so that a freak (a
# library's first compilation, another engine's arrays in the same peak) is forgotten after a few turns.
_LEAST_RATIO, _MOST_RATIO = 0.25, 4.0
_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class LeafCost:
    """One leaf of a model's cache. `row_bytes` for each token, up to `window` tokens if it forgets; `fixed_bytes` once.

    `row_bytes` is what one token's row really takes: 2·kv_heads·head_dim·b for grouped queries, the latents' width for
    MLA, the packed width with scales and biases where it is quantised.
    """

    row_bytes: int = 0
    window: int | None = None
    fixed_bytes: int = 0

    def bytes(self, num_tokens: int, chunk: int = 0) -> int:
        """After `num_tokens`; right after a turn of `chunk` tokens a window holds that many rows more."""
        if not num_tokens or not self.row_bytes:
            return self.fixed_bytes
        rows = num_tokens if self.window is None else min(num_tokens, self.window + chunk)
        return self.fixed_bytes + self.row_bytes * (-(-rows // ROWS_PER_STEP) * ROWS_PER_STEP)


@dataclass(frozen=True, slots=True)
class KvCost:
    """A model's whole cache."""

    leaves: Sequence[LeafCost]

    def bytes(self, num_tokens: int, chunk: int = 0) -> int:
        """Of one row that holds `num_tokens`."""
        return sum(leaf.bytes(num_tokens, chunk) for leaf in self.leaves)

    def padding(self, lengths: Sequence[int]) -> int:
        """What rows of these lengths take more in one batch than apart: all are as long as the longest there."""
        if not lengths:
            return 0
        return len(lengths) * self.bytes(max(lengths)) - sum(self.bytes(length) for length in lengths)

    def most_tokens(self, nbytes: int) -> int:
        """The longest row that takes at most `nbytes`; found by halving: leaves differ in where they stop growing."""
        low, high = 0, 1 << 40
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.bytes(middle) <= nbytes else (low, middle - 1)
        return low

    @property
    def widest_row(self) -> int:
        return max((leaf.row_bytes for leaf in self.leaves), default=0)


@dataclass(frozen=True, slots=True)
class Widths:
    """How wide a model's layers are, and `item_bytes` of its activations.

    `fused`: attention never writes its scores out. `experts` of a mixture run for each token, 1 for a dense model.
    """

    hidden: int
    heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int = 1
    item_bytes: int = 2
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Costs:
    """What one model's work costs."""

    kv: KvCost
    widths: Widths


UNMEASURED = Costs(KvCost(()), Widths(hidden=0, heads=0, head_dim=0, intermediate=0, vocabulary=0))


def turn_bytes(widths: Widths, kv: KvCost, tokens: int, context: int, rows: int = 1, logits: int = 0) -> int:
    """The transient of a turn: `tokens` of each of `rows` prompts, whose caches then hold `context` tokens.

    One layer's worth, for a layer's arrays go before the next one's come: the stream and its projections, the
    attention scores and their softmax unless fused, a mixture's gathers, and the widest cache leaf, which is copied
    when it grows. Logits are computed for the last token of a row only, or for `logits` tokens of all rows together.
    """
    each = 6 * widths.hidden + 4 * widths.heads * widths.head_dim + 3 * widths.intermediate * widths.experts
    scores = 0 if widths.fused else 2 * widths.heads * tokens * context
    activations = rows * (tokens * each + scores) * widths.item_bytes
    return activations + rows * kv.widest_row * context + (2 * rows + logits) * widths.vocabulary * 4


class Correction:
    """What forecasts of one kind are multiplied by: what lately proved right."""

    def __init__(self) -> None:
        self._ratio = 1.0

    def of(self, foreseen: int) -> int:
        return int(self._ratio * foreseen)

    def took(self, nbytes: int, foreseen: int) -> None:
        """What was foreseen has taken `nbytes`, by MLX's own peak; none if another engine's reset came in between."""
        if nbytes > 0 and foreseen:  # nothing is foreseen of a model that was not measured
            self._ratio += _WEIGHT * (min(max(nbytes / foreseen, _LEAST_RATIO), _MOST_RATIO) - self._ratio)


class TurnEstimator:
    """A model's turns."""

    def __init__(self, widths: Widths, kv: KvCost) -> None:
        self._widths = widths
        self._kv = kv
        self._correction = Correction()

    def bytes(self, tokens: int, context: int, rows: int = 1, logits: int = 0) -> int:
        """What a turn will take beside the caches themselves."""
        return self._correction.of(turn_bytes(self._widths, self._kv, tokens, context, rows, logits))

    def took(self, nbytes: int, *, tokens: int, context: int, rows: int = 1, logits: int = 0) -> None:
        """A turn has taken `nbytes`, by MLX's own peak."""
        self._correction.took(nbytes, turn_bytes(self._widths, self._kv, tokens, context, rows, logits))

    def most_tokens(self, wanted: int, *, least: int, done: int, room: int) -> int:
        """The largest turn of at most `wanted` tokens after `done` that fits in `room` bytes; `least` in any case."""
        tokens = wanted
        while tokens > least and self.bytes(tokens, done + tokens) > room:
            tokens = max(least, tokens // 2)
        return tokens
