"""The SSD tier: blocks and checkpoints of all models on disk, so that a restart, a crash or a reboot loses no prefix.

`SsdStore` is made once by the daemon; `ModelStore` is what one model's cache and engine use of it. All methods return
at once or run on the tier's own threads (one writer, a few readers) and give futures, except `close`. Whatever the disk
does, a prompt is computed as if nothing were stored: a failure here is a miss, counted here.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from omlxd.cache.disk import Disk
from omlxd.cache.errors import CacheError
from omlxd.cache.explain import Explanation, explanation
from omlxd.cache.keys import chain, pack, unpack
from omlxd.cache.prefix import Standing
from omlxd.cache.sessions import Chain, Quota, Session, Sessions
from omlxd.cache.ssd_format import BadFile, Model, Record, check, decode
from omlxd.cache.ssd_index import Entry, Lookup, Totals
from omlxd.cache.ssd_plan import Plan, Planner, Step
from omlxd.cache.ssd_queue import WriteQueue
from omlxd.cache.ssd_sweep import quarantine
from omlxd.cache.ssd_volume import Place, Volume
from omlxd.cache.ssd_writer import Condition, Limits, Source, Writer
from omlxd.cache.store import BLOCK, CHECKPOINT, StoredBlock, StoredCheckpoint
from omlxd.cache.tree_view import Node

log = logging.getLogger(__name__)

READERS = 4
QUEUE_BYTES = 256 << 20
MOST_BAD_REMEMBERED = 1000
ERRAND_S = 120.0  # a drive that hangs holds its thread, and must not hold a client for ever
PAGE = 256  # entries looked up at once
T = TypeVar("T")


class Unreadable(CacheError):
    """A record that was planned is not to be had: its file has gone, or is bad and has been put aside."""


@dataclass(frozen=True, slots=True)
class SsdStats:
    """The tier in one reading. `state` is "opening", "on", "paused" or "read_only", `reason` why if not on."""

    state: str
    reason: str | None
    used_bytes: int
    max_bytes: int
    queued_bytes: int
    counts: Mapping[str, int]


class SsdStore:
    """Owns the threads, the queue and the directory."""

    def __init__(
        self,
        directory: Path,
        *,
        memo: Path,
        max_bytes: int,
        min_free_bytes: int,
        quota: Quota,
        queue_bytes: int = QUEUE_BYTES,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`memo` is a file outside of the directory, on the disk that is always there; its folder exists."""
        self._disk = disk or Disk()
        self._place = Place(directory, memo)
        self._max_bytes = max_bytes
        self._queue = WriteQueue(queue_bytes)
        self._sessions = Sessions(self._disk, quota, clock)
        self._writer = Writer(
            self._place,
            Limits(max_bytes, min_free_bytes),
            self._queue,
            disk=self._disk,
            clock=clock,
            opened=self._opened,
        )
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="cache-reader")
        # Files that are slow to come hold up no answer to what there is.
        self._planners = ThreadPoolExecutor(1, thread_name_prefix="cache-planner")
        self._lookup_lock = threading.Lock()
        self._lookup: Lookup | None = None
        self._counts_lock = threading.Lock()
        self._read_counts: Counter[str] = Counter()
        self._bad: dict[bytes, None] = {}  # what bad files continued
        self._bad_of: Counter[bytes] = Counter()
        self._models: dict[bytes, str] = {}
        self._writer.start()

    # -- for the daemon -----------------------------------------------------------------------------------------------

    def view(self, model: Model) -> ModelStore:
        if model.name:
            self._models[model.identity] = model.name
            self.run(lambda volume: volume.index.name(model.identity.hex(), model.name))
        return ModelStore(self, model)

    def feed_from(self, model: Model, source: Source) -> None:
        """`source` gives, on any thread, those of the named records that are in memory."""
        self._writer.sources[model.identity] = (model, source)

    def stats(self) -> SsdStats:
        condition: Condition = self._writer.condition
        with self._counts_lock:
            counts = Counter(dict(self._writer.counts)) + self._read_counts
        return SsdStats(
            state=condition.state,
            reason=condition.reason,
            used_bytes=condition.used_bytes,
            max_bytes=self._max_bytes,
            queued_bytes=self._queue.waiting_bytes,
            counts=counts,
        )

    def totals(self) -> Mapping[str, Totals]:
        """What each model has on disk, by name; nothing while the disk cannot be asked."""
        return self._look(lambda lookup: lookup.totals()) or {}

    def nodes(self, model: Model, limit: int) -> list[Node]:
        """Those of a model used last; on any thread that may wait."""
        rows = self._look(lambda lookup: lookup.tree(model.identity.hex(), limit)) or []
        return [
            Node(
                entry.key.hex(),
                entry.parent.hex(),
                entry.start,
                entry.tokens,
                entry.kind == CHECKPOINT,
                entry.nbytes,
                pins,
                ssd=True,
                last_used=used,
            )
            for entry, used, pins in rows
        ]

    def failures_of(self, model: str) -> tuple[int, int]:
        """How many of a model's writes were dropped and how many of its files were bad, since the start."""
        mine = [identity for identity, name in self._models.items() if name == model]
        with self._counts_lock:
            return sum(self._writer.dropped[each] for each in mine), sum(self._bad_of[each] for each in mine)

    # -- sessions, on any thread that may wait ------------------------------------------------------------------------

    def list_sessions(self, model: str | None) -> list[Session]:
        return self.run(lambda volume: self._sessions.all(model)).result(ERRAND_S)

    def use_session(self, model: str, name: str) -> Session:
        """Raises NoSuchSession."""
        return self.run(lambda volume: self._sessions.use(volume, model, name)).result(ERRAND_S)

    def delete_session(self, model: str, name: str) -> Session:
        """Raises NoSuchSession. What it held is cache again, like any other."""
        return self.run(lambda volume: self._sessions.delete(volume, model, name)).result(ERRAND_S)

    def save_session(self, model: Model, name: str, tokens: Sequence[int], *, may_replace: bool) -> Session:
        """Names the last position of `tokens` that can be brought back, and holds what leads there.

        Nothing is copied: what is on disk stays, what is in memory only is written first. Raises SessionIsThere,
        TooManySessions, and Unreadable when none of it is to be had.
        """
        self._write_chain(model, tokens)

        def save(volume: Volume) -> Session:
            kept = self._chain(model, tokens)
            return self._sessions.save(volume, model.name, name, model.identity, kept, may_replace=may_replace)

        return self.run(save).result(ERRAND_S)

    def _write_chain(self, model: Model, tokens: Sequence[int]) -> None:
        _, source = self._writer.sources[model.identity]
        specs = chain(model.identity, pack(tokens), (), model.block_size)
        names = {(BLOCK, spec.key) for spec in specs}
        for stop in range(max(1, len(tokens) - 1), len(tokens) + 1):
            *_, last = chain(model.identity, pack(tokens[:stop]), (), model.block_size)
            names |= {(BLOCK, last.key), (CHECKPOINT, last.key)}
        for record in source(names):
            self._queue.offer(model, record, always=True)
        self.written().result(ERRAND_S)

    def _chain(self, model: Model, tokens: Sequence[int]) -> Chain:
        specs = chain(model.identity, pack(tokens), (), model.block_size)
        plan = self._plan(model, Standing(specs, 0, 0, len(tokens)))
        if not plan.position or any(step.record is not None for step in plan.steps):
            raise Unreadable(self._writer.condition.reason or "none of it could be kept on disk")
        held = tuple((step.kind, step.key) for step in plan.steps)
        return Chain(pack(tokens[: plan.position]), held, sum(step.nbytes for step in plan.steps))

    def clear(self, model: str | None) -> Future[int]:
        """Removes one model's files, or all, but for what sessions hold; gives the bytes."""

        def remove(volume: Volume) -> int:
            freed = 0
            for identity in volume.index.identities(model):
                self._queue.drop_model(bytes.fromhex(identity))
                freed += self._writer.remove_all(volume, identity)
            return freed

        return self.run(remove)

    def verify(self, model: str | None) -> tuple[int, int, int]:
        """Sets index and files straight and reads every file; how many, how many bad, how much was put right.

        On any thread that may wait. Raises Unavailable, OSError, sqlite3.Error.
        """
        repaired = self.run(lambda volume: self._writer.sweep_now(volume)).result()
        checked = bad = 0
        for identity in self._look(lambda lookup: lookup.identities(model)) or []:
            after = 0
            while entries := self._look(partial(_page, identity, after)):
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

    def close(self, within_s: float) -> int:
        """Writes what waits, for at most so long, and ends the threads; returns how many records were not written."""
        dropped = self._writer.close(within_s)
        self._planners.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(wait=False, cancel_futures=True)
        with self._lookup_lock:
            if self._lookup is not None:
                self._lookup.close()
        if dropped:
            log.warning("stopped before %d blocks of the cache were on disk; they will be computed again", dropped)
        return dropped

    def settled(self, timeout_s: float) -> bool:
        """Waits until index and files have been compared since the directory was opened, or cannot be."""
        return self._writer.swept.wait(timeout_s)

    def run(self, errand: Callable[[Volume], T]) -> Future[T]:
        """Does something with the directory, on the writer thread. May raise Unavailable, OSError, sqlite3.Error."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(errand(self._writer.volume))
            except (CacheError, OSError, sqlite3.Error) as error:
                done.set_exception(error)

        self._queue.run(run)
        return done

    def written(self) -> Future[None]:
        """Done when everything offered so far has been written, refused or dropped."""
        done: Future[None] = Future()
        self._queue.run(lambda: self._writer.tell_when_idle(done))
        return done

    # -- for the views ------------------------------------------------------------------------------------------------

    def offer(self, model: Model, record: Record) -> None:
        self._queue.offer(model, record)

    def used(self, keys: Iterable[bytes]) -> None:
        self._queue.used(keys)

    def submit_plan(self, model: Model, standing: Standing) -> Future[Plan]:
        return self._planners.submit(self._plan, model, standing)

    def submit_read(self, model: Model, step: Step) -> Future[Record]:
        return self._readers.submit(self._read, model, step)

    def _plan(self, model: Model, standing: Standing) -> Plan:
        """On the planner thread; an empty plan where the disk cannot be asked."""
        plan = self._look(lambda lookup: Planner(model, lookup, self._queue).plan(standing))
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
            self._read_counts["read"] += 1
            self._read_counts["read_bytes"] += len(data)
        return record

    def had_bad_file(self, parent: bytes) -> bool:
        """Whether a file that continued the block of this key was found to be bad since the start."""
        return parent in self._bad

    def _put_aside(self, identity: bytes, kind: int, key: bytes, parent: bytes, bad: BadFile) -> None:
        log.warning("a bad file of the cache is put aside: %s: %s", key.hex(), bad.reason)
        with self._counts_lock:
            self._read_counts["bad"] += 1
            self._bad_of[identity] += 1
            if len(self._bad) < MOST_BAD_REMEMBERED:
                self._bad[parent] = None
        self._forget(identity, kind, key)

    def _forget(self, identity: bytes, kind: int, key: bytes) -> None:
        """Has the writer take an entry out of the index, and its file, if there is one, out of the way."""

        def forget(volume: Volume) -> None:
            self._writer.suspects.add(identity)
            entry = volume.index.find(identity.hex(), kind, key)
            path = self._place.file(identity.hex(), kind, key)
            if entry is not None:
                volume.index.remove(entry)
            if path.exists():
                quarantine(self._place.directory, self._disk, path)

        self.run(forget)

    def _count(self, what: str) -> None:
        with self._counts_lock:
            self._read_counts[what] += 1

    def _look(self, question: Callable[[Lookup], T]) -> T | None:
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

    def _opened(self, volume: Volume) -> None:
        """The directory was opened (again): what was connected to another file of that name is let go."""
        with self._lookup_lock:
            if self._lookup is not None:
                self._lookup.close()
                self._lookup = None
        self._sessions.opened(volume)


def _page(identity: str, after: int, lookup: Lookup) -> list[Entry]:
    return lookup.page(identity, after, PAGE)


class ModelStore:
    """One model's view of the tier: `cache.store.BlockStore`, and the way back."""

    def __init__(self, store: SsdStore, model: Model) -> None:
        self.store = store
        self.model = model

    def feed_from(self, source: Source) -> None:
        """Where records are to be had again that the queue had no room for."""
        self.store.feed_from(self.model, source)

    def offer(self, record: StoredBlock | StoredCheckpoint) -> None:
        self.store.offer(self.model, record)

    def used(self, keys: Iterable[bytes]) -> None:
        self.store.used(keys)

    def explained(self, plan: Plan, found: Explanation, tokens: Sequence[int]) -> Explanation:
        """`found` is why memory has no more of a prompt; this is why disk and memory together have no more."""
        if plan.position <= found.usable_tokens:
            return found
        return explanation(
            tokens,
            (),
            usable=plan.position,
            reach=plan.reach,
            stored=unpack(plan.stored),
            recurrent=self.model.recurrent > 0,
        )

    def ends_in_bad_file(self, standing: Standing, usable: int) -> bool:
        """Whether the block at which a prompt's usable tokens end had a bad file."""
        at = usable // self.model.block_size
        return self.store.had_bad_file(standing.specs[at - 1].key if at else self.model.identity)

    def plan(self, standing: Standing) -> Future[Plan]:
        """What the disk has beyond what stands in memory."""
        return self.store.submit_plan(self.model, standing)

    def read(self, step: Step) -> Future[Record]:
        """One step's record; raises Unreadable."""
        return self.store.submit_read(self.model, step)
