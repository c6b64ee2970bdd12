"""What a measurement comes to: figures with a value, what it is held against, and the bar it should clear.

Values only, and their form as JSON; imports no mlx, so that the runner and the comparison are light. A figure that has
a reference is judged by its ratio to it, because both were measured in the same run, in turns, on the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number: the medians of `samples`, and of `reference_samples` where it is held against something.

    `target` bounds the ratio where there is a reference, else the value; `better` says from which side. A figure with
    `x` is one point of the series that its name before the last `@` names, such as `growth.queue@5000`.
    """

    name: str
    title: str
    unit: str
    better: Better
    samples: Sequence[float]
    reference: str | None = None
    reference_samples: Sequence[float] = ()
    target: float | None = None
    x: float | None = None

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    @property
    def reference_value(self) -> float | None:
        return statistics.median(self.reference_samples) if self.reference_samples else None

    @property
    def ratio(self) -> float | None:
        """To the reference; None without one."""
        reference = self.reference_value
        return self.value / reference if reference else None

    @property
    def judged(self) -> float:
        """What the target is held against, and a later run compared with."""
        ratio = self.ratio
        return self.value if ratio is None else ratio

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.judged <= self.target if self.better == "lower" else self.judged >= self.target

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the samples, as a share of their median: how sure it is."""
        if len(self.samples) < 2 or not self.value:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / 2 / abs(self.value)

    @property
    def series(self) -> str | None:
        return self.name.rpartition("@")[0] if self.x is not None else None


def to_json(figure: Figure) -> dict[str, Any]:
    """The figure with what follows from it, for readers that do not know this module."""
    return {
        "name": figure.name,
        "title": figure.title,
        "unit": figure.unit,
        "better": figure.better,
        "value": _short(figure.value),
        "samples": [_short(sample) for sample in figure.samples],
        "reference": figure.reference,
        "reference_value": None if figure.reference_value is None else _short(figure.reference_value),
        "reference_samples": [_short(sample) for sample in figure.reference_samples],
        "ratio": None if figure.ratio is None else _short(figure.ratio),
        "target": figure.target,
        "met": figure.met,
        "x": figure.x,
    }


def from_json(entry: Mapping[str, Any]) -> Figure:
    return Figure(
        name=entry["name"],
        title=entry["title"],
        unit=entry["unit"],
        better=entry["better"],
        samples=entry["samples"],
        reference=entry["reference"],
        reference_samples=entry["reference_samples"],
        target=entry["target"],
        x=entry["x"],
    )


def _short(number: float) -> float:
    """Five digits: more are noise, and make every run's file differ in full."""
    return float(f"{number:.5g}")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: `quick` is a look, not a result."""

    quick: bool = False

    def repeats(self, full: int) -> int:
        return max(2, full // 3) if self.quick else full
