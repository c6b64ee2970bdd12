"""Runs the suite: `python -m tests.bench [--only NAMES] [--quick] [--out FOLDER] [--under COMMAND]`, or `make bench`.

Each measure is a process of its own, one after the other, so that none inherits another's memory, threads or death. A
measure that fails is named and the others go on; the exit code says so. Imports no mlx.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import machine
from tests.bench.figures import Figure, from_json
from tests.bench.measures import MEASURES
from tests.bench.report import write_report

SCHEMA = "omlxd-bench-1"
LATEST = Path(__file__).parents[2] / "docs" / "benchmarks"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help=f"of these, separated by commas: {', '.join(MEASURES)}")
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a result")
    parser.add_argument("--out", type=Path, help="where latest.json and its page go; they are replaced as a whole")
    parser.add_argument("--under", default="", help="a command that each measure is run by, such as 'caffeinate -i'")
    given = parser.parse_args()
    names = [name for name in given.only.split(",") if name] or list(MEASURES)
    unknown = sorted(set(names) - set(MEASURES))
    if unknown:
        parser.error(f"no measure {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    began = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    commit = machine.commit()  # now: a commit that is made meanwhile is not what was measured
    groups = {name: run(name, under=shlex.split(given.under), quick=given.quick) for name in names}
    results = {
        "schema": SCHEMA,
        "date": began.isoformat(),
        "commit": commit,
        "machine": machine.describe(),
        "quick": given.quick,
        "failed": [name for name, figures in groups.items() if figures is None],
        "measures": {name: figures for name, figures in groups.items() if figures is not None},
    }
    whole = not given.quick and set(names) == set(MEASURES)
    out = given.out or (LATEST if whole else None)
    if out is not None:
        write_report(out, results)
        print(f"written to {out}", file=sys.stderr)
    return 1 if results["failed"] else 0


def run(name: str, *, under: Sequence[str], quick: bool) -> Sequence[Mapping[str, Any]] | None:
    """The measure's figures as JSON has them, shown as they come; None when it failed."""
    print(f"\n{MEASURES[name]} ({name})", file=sys.stderr, flush=True)
    began = time.monotonic()
    command = [*under, sys.executable, "-m", "tests.bench.measures", name, *(["--quick"] if quick else [])]
    figures = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=machine.environment()) as process:
        assert process.stdout is not None
        for line in process.stdout:
            figures.append(json.loads(line))
            print(in_a_line(from_json(figures[-1])), file=sys.stderr, flush=True)
    print(f"  took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if process.returncode != 0:
        print(f"  {name} failed with exit code {process.returncode}", file=sys.stderr, flush=True)
        return None
    return figures


def in_a_line(figure: Figure) -> str:
    words = f"  {figure.title:58} {figure.value:10.4g} {figure.unit:10}"
    if figure.ratio is not None:
        words += f" {figure.ratio:7.3f} of {figure.reference}"
    if figure.target is not None:
        sign = "≤" if figure.better == "lower" else "≥"
        words += f"  ({sign} {figure.target:g}: {'met' if figure.met else 'MISSED'})"
    return words


if __name__ == "__main__":
    sys.exit(main())
