"""The reading side of the SSD tier: what the index knows, and records out of files that have proved themselves.

`plan` and `read` give futures and run on threads of their own; everything else may wait as long as the disk does. A
file that is not what it should be is put aside by the writer, counted here, and is a miss.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from omlxd.cache.disk import Disk
from omlxd.cache.errors import CacheError
from omlxd.cache.prefix import Standing
from omlxd.cache.ssd_format import BadFile, Model, Record, check, decode
from omlxd.cache.ssd_index import Entry, Lookup
from omlxd.cache.ssd_plan import Plan, Planner, Step
from omlxd.cache.ssd_queue import WriteQueue
from omlxd.cache.ssd_sweep import quarantine
from omlxd.cache.ssd_volume import Place, Volume
from omlxd.cache.ssd_writer import Writer
from omlxd.cache.store import CHECKPOINT, StoredCheckpoint

log = logging.getLogger(__name__)

READERS = 4
MOST_BAD_REMEMBERED = 1000
PAGE = 256  # entries looked up at once
T = TypeVar("T")


class Unreadable(CacheError):
    """A record that was planned is not to be had: its file has gone, or is bad and has been put aside."""


class Reader:
    """Owns the reading threads and the connection to the index."""

    def __init__(self, place: Place, queue: WriteQueue, writer: Writer, disk: Disk) -> None:
        self._place = place
        self._queue = queue
        self._writer = writer
        self._disk = disk
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="cache-reader")
        # Files that are slow to come hold up no answer to what there is.
        self._planners = ThreadPoolExecutor(1, thread_name_prefix="cache-planner")
        self._lookup_lock = threading.Lock()
        self._lookup: Lookup | None = None
        self._counts_lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bad: dict[bytes, None] = {}  # what bad files continued
        self._bad_of: Counter[bytes] = Counter()

    def close(self) -> None:
        self._planners.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self.forget_index()

    def counts(self) -> Counter[str]:
        with self._counts_lock:
            return Counter(self._counts)

    def bad_of(self, identity: bytes) -> int:
        """How many of a model's files were bad, since the start."""
        return self._bad_of[identity]

    def had_bad_file(self, parent: bytes) -> bool:
        """Whether a file that continued the block of this key was found to be bad since the start."""
        return parent in self._bad

    # -- on its own threads -------------------------------------------------------------------------------------------

    def submit_plan(self, model: Model, standing: Standing) -> Future[Plan]:
        return self._planners.submit(self.plan, model, standing)

    def submit_read(self, model: Model, step: Step) -> Future[Record]:
        return self._readers.submit(self._read, model, step)

    def plan(self, model: Model, standing: Standing) -> Plan:
        """An empty plan where the disk cannot be asked."""
        plan = self.look(lambda lookup: Planner(model, lookup, self._queue).plan(standing))
        return plan or Plan(position=standing.position)

    def _read(self, model: Model, step: Step) -> Record:
        """On a reader thread. Raises Unreadable."""
        if step.record is not None:
            return step.record
        path = self._place.file(model.identity.hex(), step.kind, step.key)
        try:
            data = self._disk.read(path)
            record = decode(data, model, step.key)
            if isinstance(record, StoredCheckpoint) != (step.kind == CHECKPOINT):
                raise BadFile("it is of another kind than its name says")
        except FileNotFoundError as error:
            self._count("lost")
            self._forget(model.identity, step.kind, step.key)
            raise Unreadable("its file has gone") from error
        except OSError as error:
            self._count("unreadable")
            self._queue.run(self._writer.check)
            raise Unreadable(error.strerror or "it cannot be read") from error
        except BadFile as bad:
            self._put_aside(model.identity, step.kind, step.key, step.parent, bad)
            raise Unreadable(bad.reason) from bad
        with self._counts_lock:
            self._counts["read"] += 1
            self._counts["read_bytes"] += len(data)
        return record

    def verify(self, model: str | None) -> tuple[int, int, int]:
        """Sets index and files straight and reads every file; how many, how many bad, how much was put right.

        On any thread that may wait. Raises Unavailable, OSError, sqlite3.Error.
        """
        repaired = self._writer.run(self._writer.sweep_now).result()
        checked = bad = 0
        for identity in self.look(lambda lookup: lookup.identities(model)) or []:
            after = 0
            while entries := self.look(partial(_page, identity, after)):
                after = entries[-1].id
                checked += len(entries)
                bad += sum(not self._is_good(entry) for entry in entries)
        return checked, bad, repaired + bad

    def _is_good(self, entry: Entry) -> bool:
        """Whether a file is what it should be; it is put aside if not. One that is just being removed is no matter."""
        identity = bytes.fromhex(entry.identity)
        try:
            check(self._disk.read(self._place.file(entry.identity, entry.kind, entry.key)), identity, entry.key)
        except FileNotFoundError:
            return True
        except BadFile as error:
            self._put_aside(identity, entry.kind, entry.key, entry.parent, error)
            return False
        return True

    def _put_aside(self, identity: bytes, kind: int, key: bytes, parent: bytes, bad: BadFile) -> None:
        log.warning("a bad file of the cache is put aside: %s: %s", key.hex(), bad.reason)
        with self._counts_lock:
            self._counts["bad"] += 1
            self._bad_of[identity] += 1
            if len(self._bad) < MOST_BAD_REMEMBERED:
                self._bad[parent] = None
        self._forget(identity, kind, key)

    def _forget(self, identity: bytes, kind: int, key: bytes) -> None:
        """Has the writer take an entry out of the index, and its file, if there is one, out of the way."""

        def forget(volume: Volume) -> None:
            self._writer.files.suspects.add(identity)
            entry = volume.index.find(identity.hex(), kind, key)
            path = self._place.file(identity.hex(), kind, key)
            if entry is not None:
                volume.index.remove(entry)
            if path.exists():
                quarantine(self._place.directory, self._disk, path)

        self._writer.run(forget)

    def _count(self, what: str) -> None:
        with self._counts_lock:
            self._counts[what] += 1

    def look(self, question: Callable[[Lookup], T]) -> T | None:
        """Asks the index, through a connection that is made anew after a failure."""
        with self._lookup_lock:
            try:
                if self._lookup is None:
                    self._lookup = Lookup(self._place.index)
                return question(self._lookup)
            except sqlite3.Error as error:
                if not isinstance(error, sqlite3.OperationalError):
                    self._queue.run(self._writer.distrust_index)
                lookup, self._lookup = self._lookup, None
                if lookup is not None:
                    lookup.close()
                if self._writer.condition.state == "on":  # before that there may be none to ask
                    self._count("index_failures")
                return None

    def forget_index(self) -> None:
        """Lets the connection go: the directory was opened (again), and may have another index."""
        with self._lookup_lock:
            if self._lookup is not None:
                self._lookup.close()
                self._lookup = None


def _page(identity: str, after: int, lookup: Lookup) -> list[Entry]:
    return lookup.page(identity, after, PAGE)
