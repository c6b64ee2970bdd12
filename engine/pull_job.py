"""One pull under way: its progress, whether it is still wanted, and room for what it writes.

Values and small functions that every source of a pull shares. Called on worker threads.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omlxd.engine.api import Cancelled, Progress, ProgressSink, StorageFailed


@dataclass(frozen=True, slots=True)
class Job:
    """One pull under way: where its progress goes, and whether it is still wanted."""

    progress: ProgressSink
    cancelled: Callable[[], bool]

    def check(self) -> None:
        """Raises Cancelled when the pull is no longer wanted."""
        if self.cancelled():
            raise Cancelled(reason="the pull was given up")

    def at(self, done: int, total: int, detail: str | None = None) -> None:
        self.progress(Progress("download", done, total, detail))


def require_space(path: Path, needed_bytes: int) -> None:
    """Raises StorageFailed if the disk has no room for what is about to be written."""
    free = shutil.disk_usage(path).free
    if needed_bytes > free:
        raise StorageFailed(str(path), f"the disk is full: {needed_bytes} bytes needed, {free} free; free some space")
