"""How fast a model computes prompts: the measure that turns are sized by. Owned by one engine thread."""

from __future__ import annotations

# The share of the newest turn in the average: a rate follows a longer context or a busier machine within a few turns.
WEIGHT = 0.3
# Turns this small measure their own start-up more than the model.
MIN_TOKENS = 16


class PrefillRate:
    """An exponentially weighted average of tokens per second."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None

    def measured(self, num_tokens: int, elapsed_s: float) -> None:
        """A turn of `num_tokens` took `elapsed_s`."""
        if num_tokens < MIN_TOKENS or elapsed_s <= 0:
            return
        rate = num_tokens / elapsed_s
        self.tokens_per_s = rate if self.tokens_per_s is None else WEIGHT * rate + (1 - WEIGHT) * self.tokens_per_s
