"""Small plots as SVG text: bars of figures against their targets, and lines over a logarithmic axis.

Writes strings, knows figures, needs nothing installed. Colours are chosen for light and dark pages alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from tests.bench.figures import Figure

WIDTH = 860
_INK, _FAINT, _GOOD, _BAD = "#6e7781", "#d0d7de", "#2da44e", "#cf222e"
_LINES = ("#0969da", "#bf8700", "#8250df", "#1a7f37")


def bars(title: str, figures: Sequence[Figure]) -> str:
    """One bar per figure with a target: what it is judged by, as a share of the target, which is the line at 1."""
    row, left, top = 24, 420, 40
    shares = [figure.judged / (figure.target or 1.0) for figure in figures]
    scale = (WIDTH - left - 130) / max(1.0, *shares)
    parts = []
    for index, (figure, share) in enumerate(zip(figures, shares, strict=True)):
        y = top + row * index
        length = max(share * scale, 1.0)
        parts.append(_text(left - 8, y + 12, figure.title, anchor="end"))
        colour = _GOOD if figure.met else _BAD
        parts.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="16" fill="{colour}" rx="2"/>')
        parts.append(_text(left + max(length, scale) + 6, y + 12, f"{figure.judged:.3g} ({_sign(figure)})"))
    x, bottom = left + scale, top + row * len(figures)
    parts.append(f'<line x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{bottom}" stroke="{_INK}" stroke-width="2"/>')
    return _svg(title, bottom + 10, parts)


def _sign(figure: Figure) -> str:
    return f"{'≤' if figure.better == 'lower' else '≥'} {figure.target:g}"


def lines(title: str, unit: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """One line per series of (x, value): x logarithmic, the value from zero."""
    left, top, bottom, height = 70, 40, 240, 290
    points = [point for line in series.values() for point in line]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    most = max(value for _, value in points) or 1.0
    span = math.log(high / low) or 1.0

    def place(x: float, value: float) -> tuple[float, float]:
        return left + (WIDTH - left - 30) * math.log(x / low) / span, bottom - (bottom - top) * value / most

    parts = [f'<line x1="{left}" y1="{bottom}" x2="{WIDTH - 20}" y2="{bottom}" stroke="{_FAINT}"/>']
    for share in (0.0, 0.5, 1.0):
        _, y = place(low, most * share)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{WIDTH - 20}" y2="{y:.1f}" stroke="{_FAINT}"/>')
        parts.append(_text(left - 8, y + 4, f"{most * share:.3g}", anchor="end"))
    parts.append(_text(left, top - 8, unit))
    for x in sorted({x for x, _ in points}):
        parts.append(_text(place(x, 0)[0], bottom + 18, _count(x), anchor="middle"))
    for index, (name, line) in enumerate(series.items()):
        colour = _LINES[index % len(_LINES)]
        placed = [place(*point) for point in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        parts.append(_text(left + 10 + 220 * index, bottom + 40, f"\u25cf {name}", colour=colour))
    return _svg(title, height, parts)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12" role="img">'
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", _text(10, 18, title, weight="bold"), *parts, "</svg>\n"])


def _text(x: float, y: float, words: str, *, anchor: str = "start", weight: str = "normal", colour: str = _INK) -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _count(number: float) -> str:
    return f"{number / 1000:g}k" if number >= 1000 else f"{number:g}"
