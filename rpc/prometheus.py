"""`daemon.metrics` as text for Prometheus: each number under a name, with its model as a label.

A pure function. Seconds and totals are named as Prometheus wants them: `ttft_s` is `omlxd_ttft_seconds`, a counter ends
in `_total`, and the buckets of a histogram count everything below their bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from omlxd.engine.api import DaemonMetrics, Histogram


def prometheus_text(metrics: DaemonMetrics) -> str:
    """Text format 0.0.4, ending in a newline."""
    return "".join(f"{line}\n" for line in _lines(metrics))


def _lines(metrics: DaemonMetrics) -> Iterator[str]:
    for gauge, number in metrics.gauges.items():
        yield f"# TYPE {_name(gauge)} gauge"
        yield f"{_name(gauge)} {number:g}" if isinstance(number, float) else f"{_name(gauge)} {number}"
    yield "# TYPE omlxd_requests_total counter"
    for outcome, count in metrics.requests.items():
        yield f"omlxd_requests_total{{{_label('outcome', outcome)}}} {count}"
    for counter in _all({model: each.counters for model, each in metrics.models.items()}):
        yield f"# TYPE {_name(counter)}_total counter"
        for model, each in metrics.models.items():
            yield f"{_name(counter)}_total{{{_label('model', model)}}} {each.counters[counter]}"
    for histogram in _all({model: each.histograms for model, each in metrics.models.items()}):
        yield f"# TYPE {_name(histogram)} histogram"
        for model, each in metrics.models.items():
            yield from _buckets(_name(histogram), _label("model", model), each.histograms[histogram])


def _buckets(name: str, label: str, histogram: Histogram) -> Iterator[str]:
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    for bound, below in zip(bounds, accumulate(histogram.counts), strict=True):
        yield f'{name}_bucket{{{label},le="{bound}"}} {below}'
    yield f"{name}_sum{{{label}}} {histogram.sum:.17g}"
    yield f"{name}_count{{{label}}} {histogram.count}"


def _all(of_models: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The names that the models' numbers have; all of them have the same."""
    return list(next(iter(of_models.values()), {}))


def _name(name: str) -> str:
    for ours, theirs in (("_per_s", "_per_second"), ("_s", "_seconds")):
        if name.endswith(ours):
            name = name.removesuffix(ours) + theirs
            break
    return f"omlxd_{name}"


def _label(label: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{label}="{escaped}"'
