"""How fast a model computes prompts: the measure that turns are sized by. Owned by one engine thread."""

from __future__ import annotations

from omlxd.engine.scheduler import Rate

# The share of the newest turn in the averages: a rate follows a longer context or a busier machine within a few turns.
WEIGHT = 0.3
# Turns smaller than this measure their own start-up more than the model.
MIN_TOKENS = 8
# Turns are sized so that one that overruns its forecast by so many times the usual still ends in time.
OVERRUNS = 8


class PrefillRate:
    """Exponentially weighted averages of tokens per second, and of by how much turns last longer than it foretells."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        self._overrun = 0.0  # share of a turn's forecast

    def measured(self, num_tokens: int, elapsed_s: float) -> None:
        """A turn of `num_tokens` took `elapsed_s`."""
        if num_tokens < MIN_TOKENS or elapsed_s <= 0:
            return
        rate = num_tokens / elapsed_s
        if self.tokens_per_s is None:
            self.tokens_per_s = rate
            return
        overrun = max(0.0, self.tokens_per_s / rate - 1)
        self._overrun += WEIGHT * (min(overrun, 1.0) - self._overrun)
        self.tokens_per_s += WEIGHT * (rate - self.tokens_per_s)

    def read(self) -> Rate | None:
        """None before the first turn."""
        if self.tokens_per_s is None:
            return None
        return Rate(self.tokens_per_s, self.tokens_per_s / (1 + OVERRUNS * self._overrun))
