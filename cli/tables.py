"""Numbers and tables for people, as plain aligned text: the same with and without a terminal.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell, two spaces apart; no line ends in spaces."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def size(num_bytes: float) -> str:
    """Bytes in the unit that fits: `98 MB`, `1.5 GB`. Decimal units, like the settings."""
    units = ["B", "kB", "MB", "GB", "TB"]
    power = 0
    while num_bytes >= 999.5 and power < len(units) - 1:
        num_bytes /= 1000
        power += 1
    digits = 1 if units[power] in ("GB", "TB") and num_bytes < 100 else 0
    return f"{num_bytes:.{digits}f} {units[power]}"


def span(seconds: float) -> str:
    """A duration in its two largest units: `42s`, `3m 5s`, `2h 10m`, `4d 1h`."""
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d {hours % 24}h"
    if hours:
        return f"{hours}h {minutes % 60}m"
    return f"{minutes}m {whole % 60}s" if minutes else f"{whole}s"
