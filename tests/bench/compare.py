"""Compares two runs: `python -m tests.bench.compare BEFORE AFTER`, or `make bench-compare A=... B=...`.

Each is a results file or a commit, which stands for the results committed there. A figure with a reference is compared
by its ratio, whatever the machine; one without only where both runs had the same machine. A change counts when it is
beyond the threshold and beyond what both runs' own repeats differ by. Exits with 1 when something got worse.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import machine
from tests.bench.figures import Figure, from_json

SCHEMA = "omlxd-bench-1"
COMMITTED = "docs/benchmarks/latest.json"


@dataclass(frozen=True, slots=True)
class Change:
    """One figure in both runs; `by` is how much worse it got, as a share, negative where it got better."""

    figure: Figure
    before: float
    after: float
    by: float
    counts: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--threshold", type=float, default=0.1, help="the share from which a change counts (0.1)")
    given = parser.parse_args()
    before, after = read(given.before), read(given.after)
    found = changes(before, after, threshold=given.threshold)
    worse = [change for change in found if change.counts and change.by > 0]
    better = [change for change in found if change.counts and change.by < 0]
    for heading, listed in (("worse", worse), ("better", better)):
        print(f"{heading}: {len(listed) or 'none'}")
        for change in sorted(listed, key=lambda each: -abs(each.by)):
            print(f"  {change.figure.title:60} {change.before:10.4g} -> {change.after:10.4g}  ({abs(change.by):.0%})")
    print(f"as before: {len(found) - len(worse) - len(better)}")
    for name in sorted(figures(before).keys() ^ figures(after).keys()):
        print(f"  only in one of them: {name}")
    return 1 if worse else 0


def read(source: str) -> Mapping[str, Any]:
    """A run's results. Exits with 2 where there are none, or of a form that this module does not know."""
    try:
        path = Path(source)
        text = path.read_text() if path.is_file() else machine.at_commit(source, COMMITTED)
        results: Mapping[str, Any] = json.loads(text)
    except (subprocess.CalledProcessError, ValueError):
        print(f"{source} is neither a results file nor a commit that has {COMMITTED}", file=sys.stderr)
        sys.exit(2)
    if results.get("schema") != SCHEMA:
        print(f"{source} has the form {results.get('schema')!r}, this compares {SCHEMA!r}", file=sys.stderr)
        sys.exit(2)
    return results


def figures(results: Mapping[str, Any]) -> dict[str, Figure]:
    return {entry["name"]: from_json(entry) for entries in results["measures"].values() for entry in entries}


def changes(before: Mapping[str, Any], after: Mapping[str, Any], *, threshold: float) -> list[Change]:
    """Every figure that can be compared, in the later run's order."""
    same_machine = all(before["machine"][key] == after["machine"][key] for key in ("processor", "cores", "openblas"))
    earlier = figures(before)
    pairs = [(earlier[name], figure) for name, figure in figures(after).items() if name in earlier]
    return [_change(old, new, threshold) for old, new in pairs if same_machine or new.reference is not None]


def _change(old: Figure, new: Figure, threshold: float) -> Change:
    grown = new.judged / old.judged - 1 if old.judged else 0.0
    by = grown if new.better == "lower" else -grown
    counts = abs(by) > max(threshold, 2 * (old.spread + new.spread))
    return Change(new, old.judged, new.judged, by, counts)


if __name__ == "__main__":
    sys.exit(main())
