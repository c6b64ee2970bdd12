"""The files of the SSD tier: written whole or not at all, within the limits, and taken away again.

Owned by the writer thread, which hands in the open volume; all methods raise OSError and sqlite3.Error. Whatever is
written is in the index when its transaction ends, and what goes to make room is what was used longest ago.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omlxd.cache.disk import Disk
from omlxd.cache.ssd_format import BadFile, Model, encode, missing_rows
from omlxd.cache.ssd_index import ALIEN, Entry, entry_of
from omlxd.cache.ssd_queue import Job
from omlxd.cache.ssd_volume import Place, Volume
from omlxd.cache.store import BLOCK, CHECKPOINT, StoredCheckpoint

log = logging.getLogger(__name__)

Written = Literal["new", "there", "refused"]  # a file was there already; there was no room for one


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes that all models' files may have together, and that the disk must keep free."""

    max_bytes: int
    min_free_bytes: int


class Files:
    """Writes and removes. `counts` and `dropped` are what others may read; `suspects` they may add to."""

    def __init__(self, place: Place, limits: Limits, disk: Disk, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds."""
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[bytes] = Counter()  # by model
        # Models that had a bad file: what is computed again of theirs takes the place of what the index says is there.
        self.suspects: set[bytes] = set()
        self.limits = limits  # swapped as a whole
        self._place = place
        self._disk = disk
        self._clock = clock

    def write(self, volume: Volume, job: Job) -> Written:
        model, record = job.model, job.record
        identity = model.identity.hex()
        kind, key = job.offer.name
        now = self._clock()
        there = volume.index.find(identity, kind, key)
        is_good = model.identity not in self.suspects
        if there is not None and is_good and there.gaps <= missing_rows(record):
            volume.index.use([key], now)
            return "there"
        try:
            parts = encode(record, model)
        except BadFile as bad:
            log.error("a block cannot be written: %s", bad.reason)
            self.drop(model)
            return "refused"
        size = sum(len(part) for part in parts)
        volume.index.use([record.parent], now)  # it must not go to make room for what continues it
        if not self.make_room(volume, size):
            self.drop(model)
            return "refused"
        path, part = self._place.file(identity, kind, key), self._place.part(identity, kind, key)
        volume.make_directory(identity)
        self._put(part, path, parts)
        entry = entry_of(
            record.spec,
            record.parent,
            identity=identity,
            is_checkpoint=isinstance(record, StoredCheckpoint),
            gaps=missing_rows(record),
            nbytes=size,
        )
        volume.index.add(entry, used=now, pictures=bool(record.spec.spans))
        self.counts["written"] += 1
        if kind == BLOCK and not entry.gaps and not record.spec.spans:
            for shorter in volume.index.superseded(entry):
                self.remove(volume, shorter)
        return "new"

    def drop(self, model: Model, count: int = 1) -> None:
        self.counts["dropped"] += count
        self.dropped[model.identity] += count

    def _put(self, part: Path, path: Path, parts: Sequence[bytes]) -> None:
        """A reader sees the whole file or none. It is not synced: after a power cut its digest tells what was lost."""
        done = False
        try:
            self._disk.write(part, parts)
            self._disk.rename(part, path)
            done = True
        finally:
            if not done:
                part.unlink(missing_ok=True)

    def make_room(self, volume: Volume, size: int) -> bool:
        """Removes what was used longest ago until `size` more bytes are within both limits."""
        while self._lacks_room(volume, size):
            victim = volume.index.oldest() if size <= self.limits.max_bytes else None
            if victim is None:
                return False
            self.remove(volume, victim)
            self.counts["evicted"] += 1
        return True

    def _lacks_room(self, volume: Volume, size: int) -> bool:
        if volume.index.used_bytes + size > self.limits.max_bytes:
            return True
        return self._disk.free_bytes(self._place.directory) - size < self.limits.min_free_bytes

    def remove(self, volume: Volume, entry: Entry) -> int:
        """Takes one entry and its file away; returns its bytes."""
        volume.index.remove(entry)
        for kind in (BLOCK, CHECKPOINT) if entry.kind == ALIEN else (entry.kind,):
            with suppress(FileNotFoundError):
                self._disk.remove(self._place.file(entry.identity, kind, entry.key))
        return entry.nbytes

    def remove_all(self, volume: Volume, identity: str) -> int:
        """Takes away everything of one model that nothing holds; returns its bytes."""
        volume.index.begin()
        freed = sum(self.remove(volume, entry) for entry in volume.index.unpinned(identity))
        volume.index.commit()
        return freed
