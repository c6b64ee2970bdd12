"""What one model's engine has done, counted where it happens.

`Meter` belongs to the engine thread and costs a token a dictionary entry and a bisection: plain numbers, no lock. What
others see is a frozen `ModelMetrics`, read off a few times a second and published by swapping one reference. `joined`
adds two readings, so that a model's numbers outlive its engines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from omlxd.engine.api import Cancelled, GenerationResult, Histogram, ModelMetrics
from omlxd.engine.stream import Event

if TYPE_CHECKING:  # it loads mlx, and the pool reads metrics on the event loop's side
    from omlxd.engine.request import Clock, Request

_WAITS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_GAPS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
_TOKENS = (0, 64, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)


class _Counts:
    """A histogram that is being filled."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def read(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._sum)


_COUNTERS = (
    "requests_finished",
    "requests_cancelled",
    "requests_failed",
    "prompt_tokens",
    "cached_tokens",
    "prefill_tokens",
    "pictures",
    "pictures_seen",
    "generated_tokens",
    "requests_preempted",
    "requests_held",
    "failed_steps",
)
_HISTOGRAMS: Mapping[str, Sequence[float]] = {
    "ttft_s": _WAITS_S,
    "itl_s": _GAPS_S,
    "queue_s": _WAITS_S,
    "picture_s": _WAITS_S,
    "prefill_tokens_per_s": _RATES,
    "decode_tokens_per_s": _RATES,
    "hit_tokens": _TOKENS,
    "batch_size": _ROWS,
}


class Meter:
    """Counts what the engine does; each method is called at the moment that it names."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now = 0.0
        self._last: dict[str, float] = {}  # when each live request drew its latest token
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._histograms = {name: _Counts(bounds) for name, bounds in _HISTOGRAMS.items()}

    def admitted(self, request: Request) -> None:
        """The request leaves the line for the first time; its prefix has been looked up."""
        job = request.job
        self._histograms["queue_s"].add(self._clock() - job.arrived)
        self._counters["prompt_tokens"] += len(job.prompt)
        self._counters["cached_tokens"] += request.cached
        self._counters["pictures"] += len(job.pictures)
        if job.use_cache:
            self._histograms["hit_tokens"].add(request.cached)

    def saw(self, elapsed_s: float) -> None:
        """The vision tower saw a picture, of which nothing was kept."""
        self._counters["pictures_seen"] += 1
        self._histograms["picture_s"].add(elapsed_s)

    def prefilled(self, num_tokens: int, elapsed_s: float) -> None:
        """A turn computed `num_tokens` of prompts, padding not counted."""
        self._counters["prefill_tokens"] += num_tokens
        if elapsed_s > 0:
            self._histograms["prefill_tokens_per_s"].add(num_tokens / elapsed_s)

    def stepped(self, rows: int) -> None:
        """A step's token of each of `rows` rows is there; `drew` follows for each."""
        self._histograms["batch_size"].add(rows)
        self.joined(rows)

    def joined(self, rows: int) -> None:
        """The first token of each of `rows` rows is there; `drew` follows for each."""
        self._now = self._clock()
        self._counters["generated_tokens"] += rows

    def drew(self, request: Request) -> None:
        """One of the step's tokens is this request's. A preempted row's pause counts as what it was for its reader."""
        last = self._last.get(request.id)
        if last is None:
            self._histograms["ttft_s"].add(self._now - request.job.arrived)
        else:
            self._histograms["itl_s"].add(self._now - last)
        self._last[request.id] = self._now

    def held(self) -> None:
        """A request waits for another's prefix."""
        self._counters["requests_held"] += 1

    def preempted(self) -> None:
        self._counters["requests_preempted"] += 1

    def step_failed(self) -> None:
        self._counters["failed_steps"] += 1

    def ended(self, request: Request, event: Event) -> None:
        self._last.pop(request.id, None)
        if isinstance(event, GenerationResult):
            self._counters["requests_finished"] += 1
            if event.timings.tokens_per_s > 0:
                self._histograms["decode_tokens_per_s"].add(event.timings.tokens_per_s)
        elif isinstance(event, Cancelled):
            self._counters["requests_cancelled"] += 1
        else:
            self._counters["requests_failed"] += 1

    def read(self) -> ModelMetrics:
        histograms = {name: counts.read() for name, counts in self._histograms.items()}
        return ModelMetrics(dict(self._counters), histograms)


def joined(first: ModelMetrics, second: ModelMetrics) -> ModelMetrics:
    """Both readings as one. They come from meters of this module, so their names and bounds are the same."""
    counters = {name: count + second.counters[name] for name, count in first.counters.items()}
    histograms = {name: _sum(one, second.histograms[name]) for name, one in first.histograms.items()}
    return ModelMetrics(counters, histograms)


def _sum(a: Histogram, b: Histogram) -> Histogram:
    return Histogram(a.bounds, tuple(x + y for x, y in zip(a.counts, b.counts, strict=True)), a.sum + b.sum)
