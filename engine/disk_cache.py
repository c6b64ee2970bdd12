"""The SSD tier as the daemon runs it: opened with the first model, asked about, checked, emptied and closed.

`DiskCache` holds the store that the models' caches share. Opening it imports mlx, so it waits until something needs it:
a daemon without a model stays small. For any thread; everything but `stats` may take as long as the disk does.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omlxd.cache.ssd import SsdStats, SsdStore
    from omlxd.cache.ssd_index import Totals

SETTLE_S = 120.0


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Where the tier is and what it may take. `memo` is a file on the home's own disk, see `cache.ssd_volume`."""

    directory: Path
    memo: Path
    max_bytes: int
    min_free_bytes: int
    max_sessions: int
    max_session_bytes: int


@dataclass(frozen=True, slots=True)
class Verified:
    """What checking every file came to; `repaired` are bad files put aside and entries set straight."""

    checked: int = 0
    bad: int = 0
    repaired: int = 0


class DiskCache:
    """Owns the store."""

    def __init__(self, options: DiskOptions | None) -> None:
        """None: there is no tier on disk."""
        self._options = options
        self._lock = threading.Lock()
        self._store: SsdStore | None = None
        self._is_closed = False

    @property
    def is_enabled(self) -> bool:
        return self._options is not None and self._options.max_bytes > 0

    def open(self) -> SsdStore | None:
        """The store, opened at the first call; None if there is to be none."""
        if not self.is_enabled or self._options is None:
            return None
        from omlxd.cache.sessions import Quota
        from omlxd.cache.ssd import SsdStore

        with self._lock:
            if self._store is None and not self._is_closed:
                self._store = SsdStore(
                    self._options.directory,
                    memo=self._options.memo,
                    max_bytes=self._options.max_bytes,
                    min_free_bytes=self._options.min_free_bytes,
                    quota=Quota(self._options.max_sessions, self._options.max_session_bytes),
                )
            return self._store

    def set_limits(self, options: DiskOptions) -> None:
        """Takes up the limits, not the place, from any thread, at once. Without a tier there is nothing to limit."""
        if self._options is None:
            return
        with self._lock:
            self._options = replace(options, directory=self._options.directory, memo=self._options.memo)
            store = self._store
        if store is not None:
            from omlxd.cache.sessions import Quota
            from omlxd.cache.ssd_files import Limits

            limits = Limits(options.max_bytes, options.min_free_bytes)
            store.set_limits(limits, Quota(options.max_sessions, options.max_session_bytes))

    def stats(self) -> SsdStats | None:
        """None before the store is opened, and where there is none. Returns at once."""
        return None if self._store is None else self._store.stats()

    @property
    def queued_bytes(self) -> int:
        """What waits to be written, `HotTier`'s `offered_bytes` of it in memory anyway. Returns at once."""
        return 0 if self._store is None else self._store.queued_bytes

    @property
    def max_bytes(self) -> int:
        return self._options.max_bytes if self._options is not None else 0

    @property
    def directory(self) -> Path | None:
        return self._options.directory if self._options is not None else None

    def failures_of(self, model: str) -> tuple[int, int]:
        """How many of a model's writes were dropped, and how many of its files were bad."""
        return (0, 0) if self._store is None else self._store.failures_of(model)

    @property
    def max_session_bytes(self) -> int:
        return self._options.max_session_bytes if self._options is not None else 0

    def totals(self) -> Mapping[str, Totals]:
        """What is on disk, by the models' names."""
        store = self.open()
        return store.totals() if store is not None else {}

    def settle(self) -> None:
        """Waits until what has been offered is on disk, as far as it can be. Raises TimeoutError."""
        if self._store is not None:
            self._store.written().result(SETTLE_S)

    def clear(self, model: str | None) -> int:
        """Removes one model's files, or all, but for those that sessions hold; returns the bytes. Raises CacheError."""
        store = self.open()
        return store.clear(model).result() if store is not None else 0

    def verify(self, model: str | None) -> Verified:
        """Reads every file of one model, or of all. Raises CacheError, OSError."""
        store = self.open()
        return Verified(*store.verify(model)) if store is not None else Verified()

    def close(self, within_s: float) -> int:
        """Writes what waits, for at most so long; returns how many blocks were not written."""
        with self._lock:
            self._is_closed = True
            store = self._store
        return store.close(within_s) if store is not None else 0
