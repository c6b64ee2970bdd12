"""A Linux container's memory: how much its control groups allow, and how much they have given out.

Reads files only, of version 1 and of version 2; every one of them may be missing, which is no limit. Called by the
Linux reader, on the memory-enforcer thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60  # version 1 writes a number near 2**63 for none


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """`limit` and `used` in bytes; what of `used` is files' pages, which are given up when memory is wanted."""

    limit: int
    used: int
    files: int

    @property
    def available(self) -> int:
        return max(0, self.limit - self.used + self.files)


def tightest(root: Path) -> GroupMemory | None:
    """The group over this process that leaves least, itself or one above it; None where nothing is limited.

    `root` is `/`, or a test's picture of it.
    """
    found = [memory for folder in _folders(root) if (memory := _memory(folder)) is not None]
    return min(found, key=lambda memory: memory.available, default=None)


def _folders(root: Path) -> Iterator[Path]:
    """The process's group and all above it, as far as they are visible here."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "memory" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup/memory"]
        else:
            continue
        for mount in mounts:
            below = Path(path.lstrip("/"))
            yield from (mount / part for part in (below, *below.parents))


def _memory(folder: Path) -> GroupMemory | None:
    for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < _NO_LIMIT:
            return GroupMemory(limit, used, _files(folder))
    return None


def _files(folder: Path) -> int:
    statistics = dict(line.split(None, 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    named = [statistics[name] for name in ("inactive_file", "total_inactive_file") if name in statistics]
    return max((int(value) for value in named if value.isdigit()), default=0)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
