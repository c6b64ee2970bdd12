"""What waits to be written: records, keys that were used, and errands, on their way to the writer thread.

Any thread puts in and returns at once; the writer alone takes out. Records are bounded in bytes: one that finds the
queue full is refused and noted as missed, to be asked for again when the writer has nothing better to do. Until a
record is written (or given up) it can be found here, so that what memory has just dropped is not lost in between. Each
offer is answered once, outside of the queue's lock: whether the record is on disk now.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sized
from dataclasses import dataclass
from itertools import islice

from omlxd.cache.keys import common_run
from omlxd.cache.ssd_format import Model, Record, missing_rows
from omlxd.cache.store import Name, Offer, StoredBlock

MOST_MISSED = 100_000


@dataclass(frozen=True, slots=True)
class Job:
    """A record to be written, for a model."""

    model: Model
    offer: Offer

    @property
    def record(self) -> Record:
        return self.offer.record


class WriteQueue:
    """The queue. `errands` are the writer's other work: never refused, for each is somebody's one request."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._jobs: OrderedDict[tuple[bytes, Name], Job] = OrderedDict()
        self._writing: Job | None = None
        self._bytes = 0
        self._errands: list[Callable[[], None]] = []
        self._used: dict[bytes, None] = {}
        self._missed: dict[tuple[bytes, Name], None] = {}

    # -- any thread ---------------------------------------------------------------------------------------------------

    def offer(self, model: Model, offer: Offer, *, always: bool = False) -> bool:
        """Whether it was taken; `always` knows no bound. One that is there already is replaced: the newer is better."""
        name = (model.identity, offer.name)
        with self._changed:
            there = self._jobs.pop(name, None)
            self._bytes -= there.offer.nbytes if there else 0
            is_taken = always or self._bytes + offer.nbytes <= self._max_bytes
            if is_taken:
                self._jobs[name] = Job(model, offer)
                self._bytes += offer.nbytes
                self._missed.pop(name, None)
                self._wake(self._jobs)
            else:
                self._miss(name)
        if there is not None:
            there.offer.tell(False)
        if not is_taken:
            offer.tell(False)
        return is_taken

    def has_room(self, nbytes: int) -> bool:
        with self._changed:
            return self._bytes + nbytes <= self._max_bytes

    def used(self, keys: Iterable[bytes]) -> None:
        with self._changed:
            if not self._used:
                self._changed.notify()
            self._used.update(dict.fromkeys(keys))

    def run(self, errand: Callable[[], None]) -> None:
        with self._changed:
            self._errands.append(errand)
            self._changed.notify()

    def find(self, identity: bytes, name: Name) -> Record | None:
        with self._changed:
            job = self._jobs.get((identity, name)) or self._current(identity, name)
            return job.record if job else None

    def alike(self, identity: bytes, parent: bytes, tokens: bytes) -> StoredBlock | None:
        """The waiting block after `parent` that shares the most first tokens: of several, the one with most rows."""
        with self._changed:
            waiting = [*self._jobs.values(), *([self._writing] if self._writing else [])]
        near = [
            job.record
            for job in waiting
            if isinstance(job.record, StoredBlock) and job.model.identity == identity and job.record.parent == parent
        ]
        best = max(near, key=lambda each: (common_run(each.spec.tokens, tokens), -missing_rows(each)), default=None)
        return best if best is not None and common_run(best.spec.tokens, tokens) else None

    def _current(self, identity: bytes, name: Name) -> Job | None:
        job = self._writing
        return job if job and job.model.identity == identity and job.offer.name == name else None

    @property
    def waiting_bytes(self) -> int:
        with self._changed:
            return self._bytes

    @property
    def length(self) -> int:
        with self._changed:
            return len(self._jobs) + (self._writing is not None)

    @property
    def left(self) -> int:
        """How many records have not been written, refused ones included."""
        with self._changed:
            return len(self._jobs) + len(self._missed) + (self._writing is not None)

    # -- the writer ---------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> None:
        """Sleeps until there is something to do, or for so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._errands or self._used or self._missed, timeout_s)

    def rest(self, timeout_s: float) -> None:
        """Sleeps for so long, unless a record or an errand comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._errands, timeout_s)

    def breathe(self, timeout_s: float) -> None:
        """Sleeps for so long, unless an errand comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._errands, timeout_s)

    def next_job(self) -> Job | None:
        """The oldest record. It can still be found until `done`."""
        with self._changed:
            if not self._jobs:
                return None
            _, self._writing = self._jobs.popitem(last=False)
            return self._writing

    def done(self, *, on_disk: bool) -> None:
        """The record that was taken out is on disk now, or will not be."""
        job = self._put_away()
        if job is not None:
            job.offer.tell(on_disk)

    def miss(self) -> None:
        """The record could not be written now; it is noted, as if it had been refused."""
        job = self._put_away()
        if job is not None:
            self.note_missed(job.model.identity, [job.offer.name])
            job.offer.tell(False)

    def _put_away(self) -> Job | None:
        with self._changed:
            job, self._writing = self._writing, None
            self._bytes -= job.offer.nbytes if job else 0
            return job

    def _miss(self, name: tuple[bytes, Name]) -> None:
        if len(self._missed) < MOST_MISSED:
            self._missed[name] = None
            self._wake(self._missed)

    def _wake(self, waiting: Sized) -> None:
        """The first that waits wakes the writer; it knows of the others, and its rest between two writes is its own."""
        if len(waiting) == 1:
            self._changed.notify()

    def note_missed(self, identity: bytes, names: Iterable[Name]) -> None:
        with self._changed:
            for name in names:
                self._miss((identity, name))

    def next_errand(self) -> Callable[[], None] | None:
        with self._changed:
            return self._errands.pop(0) if self._errands else None

    def take_used(self) -> list[bytes]:
        with self._changed:
            used, self._used = list(self._used), {}
            return used

    def take_missed(self, identity: bytes, most: int) -> set[Name]:
        """What was refused of one model first; it is not noted any longer."""
        with self._changed:
            mine = list(islice((one for one in self._missed if one[0] == identity), most))
            for one in mine:
                del self._missed[one]
            return {name for _, name in mine}

    @property
    def has_missed(self) -> bool:
        with self._changed:
            return bool(self._missed)

    def drop_model(self, identity: bytes) -> int:
        """Forgets what waits for one model; returns how many records."""
        with self._changed:
            mine = [self._jobs.pop(name) for name in list(self._jobs) if name[0] == identity]
            self._bytes -= sum(job.offer.nbytes for job in mine)
            for name in [one for one in self._missed if one[0] == identity]:
                del self._missed[name]
        for job in mine:
            job.offer.tell(False)
        return len(mine)

    def forget_missed(self, known: Collection[bytes]) -> int:
        """Gives up what was refused of models that nobody can be asked about; returns how many records."""
        with self._changed:
            lost = [one for one in self._missed if one[0] not in known]
            for one in lost:
                del self._missed[one]
            return len(lost)
