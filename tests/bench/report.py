"""The report: `latest.json` with everything, `latest.md` for people, and the plots beside it.

Written as a whole by the runner; nothing else writes in that folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure, from_json
from tests.bench.measures import MEASURES
from tests.bench.plots import bars, lines


def write_report(folder: Path, results: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    (folder / "latest.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    measures = {name: [from_json(entry) for entry in entries] for name, entries in results["measures"].items()}
    page = [*_head(results), *_against_targets(folder, measures)]
    for name, figures in measures.items():
        page += ["", f"## {MEASURES[name]}", ""]
        page += _table([figure for figure in figures if figure.series is None])
        page += _series(folder, [figure for figure in figures if figure.series is not None])
    (folder / "latest.md").write_text("\n".join(page) + "\n")


def _head(results: Mapping[str, Any]) -> list[str]:
    machine = results["machine"]
    commit, _, changes = results["commit"].partition("+")
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    blas = "OpenBLAS on one thread" if machine["openblas"] else "the BLAS that mlx brings"
    lines = [
        "# Benchmarks: the latest run",
        "",
        f"{results['date'][:10]}, commit `{commit[:12]}`{' and changes' * bool(changes)}."
        f" {machine['processor']}, {machine['cores']} cores, {machine['system']}; {blas};"
        f" Python {machine['python']}, {versions}.",
        "",
        "Made by `make bench`; [benchmarks.md](../benchmarks.md) says what is measured and how. Each value is the"
        " median of its repeats, ± half the distance between their quartiles; a ratio compares two things measured in"
        " turns in one process. Everything is in [latest.json](latest.json).",
    ]
    if results["quick"]:
        lines += ["", "**A quick run: a look, not a result.**"]
    if results["failed"]:
        lines += ["", f"**Failed, and missing here: {', '.join(results['failed'])}.**"]
    return lines


def _against_targets(folder: Path, measures: Mapping[str, Sequence[Figure]]) -> list[str]:
    """Every figure with a bar to clear, on one page: those of ratios as a plot."""
    judged = [figure for figures in measures.values() for figure in figures if figure.target is not None]
    ratios = [figure for figure in judged if figure.ratio is not None]
    if not judged:
        return []
    page = ["", "## Against the targets", ""]
    missed = [figure for figure in judged if not figure.met]
    page.append(f"{len(judged) - len(missed)} of {len(judged)} met.")
    for name, higher in (("speed", True), ("time", False)):
        chosen = [figure for figure in ratios if (figure.better == "higher") is higher]
        if chosen:
            words = "higher is better" if higher else "lower is better"
            (folder / f"ratios-{name}.svg").write_text(
                bars(f"Ratio to the reference, {words}; the mark is the target", chosen)
            )
            page += ["", f"![ratios](ratios-{name}.svg)"]
    if missed:
        page += ["", "Missed:", "", *_table(missed)]
    return page


def _table(figures: Sequence[Figure]) -> list[str]:
    if not figures:
        return []
    rows = ["| | value | | ratio | target | |", "|---|---:|---|---|---|---|"]
    for figure in figures:
        spread = f"± {figure.spread:.0%}" if len(figure.samples) > 1 else ""
        ratio = "" if figure.ratio is None else f"{figure.ratio:.3g} of {figure.reference}"
        sign = "≤" if figure.better == "lower" else "≥"
        target = "" if figure.target is None else f"{sign} {figure.target:g}"
        verdict = {None: "", True: "met", False: "**missed**"}[figure.met]
        rows.append(
            f"| {figure.title} | {figure.value:.4g} {figure.unit} | {spread} | {ratio} | {target} | {verdict} |"
        )
    return rows


def _series(folder: Path, figures: Sequence[Figure]) -> list[str]:
    """A plot and a table for each series, in their order."""
    page: list[str] = []
    for series in dict.fromkeys(figure.series for figure in figures):
        points = [figure for figure in figures if figure.series == series]
        title = points[0].title
        file = f"{str(series).replace('.', '-')}.svg"
        line = [(figure.x or 0.0, figure.value) for figure in points]
        (folder / file).write_text(lines(title, points[0].unit, {title: line}))
        head = " | ".join(f"{figure.x:g}" for figure in points)
        values = " | ".join(f"{figure.value:.4g}" for figure in points)
        page += ["", f"![{title}]({file})", "", f"| | {head} |", "|---" + "|---:" * len(points) + "|"]
        page.append(f"| {title}, {points[0].unit} | {values} |")
    return page
