"""What `launchctl print` prints, read as far as it can be. Apple calls that text no interface, so nothing is required
of it: what is not found is None or empty, and whoever asks has to do without.

Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

# launchd's words for a job without a process: one that it will start by itself, and one that it will not.
HELD_BACK: Final = "spawn scheduled"
STOPPED: Final = "not running"


@dataclass(frozen=True, slots=True)
class Printed:
    """One loaded service. `last_exit` is launchd's wording, `last_exit_code` the number in it."""

    state: str | None = None
    pid: int | None = None
    path: str | None = None
    runs: int | None = None
    last_exit: str | None = None
    last_exit_code: int | None = None
    last_signal: str | None = None
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def parse_service(text: str) -> Printed:
    """The text of `launchctl print DOMAIN/LABEL`: `name = value` one tab in, blocks of lines in braces."""
    values: dict[str, str] = {}
    blocks: dict[str, list[str]] = {}
    for name, value in _entries(text):
        if isinstance(value, list):
            blocks.setdefault(name, value)
        else:
            values.setdefault(name, value)
    last_exit = values.get("last exit code")
    return Printed(
        state=values.get("state"),
        pid=_number(values.get("pid")),
        path=values.get("path"),
        runs=_number(values.get("runs")),
        last_exit=last_exit,
        last_exit_code=_number(last_exit),
        last_signal=values.get("last terminating signal"),
        arguments=tuple(blocks.get("arguments", ())),
        environment=_pairs(blocks.get("environment", ())),
    )


def parse_disabled(text: str) -> Mapping[str, bool]:
    """The text of `launchctl print-disabled DOMAIN`: whether each label that is listed is switched off."""
    pairs = re.findall(r'"([^"]+)"\s*=>\s*(\w+)', text)
    return {label: word in ("disabled", "true") for label, word in pairs}


def _entries(text: str) -> Iterator[tuple[str, str | list[str]]]:
    """Top-level entries; a block's own blocks are left out."""
    block: tuple[str, list[str]] | None = None
    depth = 0
    for line in map(str.strip, text.splitlines()[1:]):
        if line.endswith("{"):
            depth += 1
            if depth == 1:
                block = (line.removesuffix("{").rstrip(" ="), [])
        elif line == "}":
            depth -= 1
            if depth == 0 and block is not None:
                yield block
                block = None
        elif depth == 1 and block is not None:
            block[1].append(line)
        elif depth == 0 and " = " in line:
            name, _, value = line.partition(" = ")
            yield name, value


def _pairs(lines: Sequence[str]) -> Mapping[str, str]:
    return {name: value for name, arrow, value in (line.partition(" => ") for line in lines) if arrow}


def _number(text: str | None) -> int | None:
    match = re.match(r"-?\d+", text or "")
    return int(match[0]) if match else None
