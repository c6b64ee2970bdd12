"""The writer thread of the SSD tier: the only one that changes the directory, its index and its recency.

It takes records from the queue, makes room for them and writes them; with nothing to write it sets index and files
straight, and asks the caches again for what they could not hand over while the queue was full. A failing disk pauses
it: what is offered meanwhile stays in memory only, and the directory is tried again from time to time.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from omlxd.cache.disk import Disk
from omlxd.cache.errors import CacheError
from omlxd.cache.ssd_files import Files, Limits, Written
from omlxd.cache.ssd_format import Model
from omlxd.cache.ssd_queue import Job, WriteQueue
from omlxd.cache.ssd_sweep import sweep
from omlxd.cache.ssd_volume import Place, ReadOnly, Unavailable, Volume
from omlxd.cache.store import Name, Offer

log = logging.getLogger(__name__)

RETRY_S = (2.0, 5.0, 15.0, 60.0)  # after a failure; the last one for good
# Between two writes it rests so many times as long as the last one took: digesting and writing take a processor and
# memory's bandwidth from those who decode. What the queue then has no room for is asked for again later.
REST = 12.0
REFILL = 16  # records asked for again at once: errands wait for so many
SETTLE_S = 0.5  # how long uses gather before they are written down

T = TypeVar("T")
Source = Callable[[Collection[Name]], Sequence[Offer]]


@dataclass(frozen=True, slots=True)
class Condition:
    """How the tier is: "opening", "on", "paused" (it is tried again) or "read_only", and why if not on."""

    state: str = "opening"
    reason: str | None = None
    used_bytes: int = 0


class Writer:
    """Owns the volume. `condition` and the files' counts are what others may read; `sources` they may add to."""

    def __init__(
        self,
        place: Place,
        limits: Limits,
        queue: WriteQueue,
        *,
        disk: Disk,
        clock: Callable[[], float],
        opened: Callable[[Volume], None],
    ) -> None:
        """`opened` is called on the thread whenever the directory has been opened. `clock` gives Unix seconds."""
        self.condition = Condition()
        self.files = Files(place, limits, disk, clock)
        self.sources: dict[bytes, tuple[Model, Source]] = {}
        self._place = place
        self._queue = queue
        self._disk = disk
        self._clock = clock
        self._volume: Volume | None = None
        self._sweep: Iterator[None] | None = None
        self._opened = opened
        self._told_when_idle: list[Future[None]] = []
        self._must_prove = False
        self._failures = 0
        self._retry_at = 0.0
        self._index_is_broken = False
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._main, name="cache-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, within_s: float) -> int:
        """Writes what waits, for at most so long, and ends the thread; returns how many records were dropped."""
        deadline = self._clock() + within_s
        self._queue.run(lambda: self._stop(deadline))
        self._thread.join(within_s + 1.0)  # a drive that hangs holds the thread, and must not hold the daemon
        return self._queue.left

    def run(self, errand: Callable[[Volume], T]) -> Future[T]:
        """Does something with the directory, on the thread. The future may have CacheError, OSError, sqlite3.Error."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(errand(self.volume))
            except (CacheError, OSError, sqlite3.Error) as error:
                done.set_exception(error)

        self._queue.run(run)
        return done

    def written(self) -> Future[None]:
        """Done when everything offered so far has been written, refused or dropped, and the files are set straight."""
        done: Future[None] = Future()
        self._queue.run(lambda: self._told_when_idle.append(done))
        return done

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _stop(self, at: float) -> None:
        self._stop_at = at

    def _main(self) -> None:
        while not self._is_over():
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001  the top of this thread's loop: the tier pauses, the daemon goes on
                self._trouble(error)
        try:
            self._note_uses()
        except (OSError, sqlite3.Error) as error:
            self._trouble(error)
        self._tell_idle()
        if self._volume is not None:
            self._volume.close()

    def _is_over(self) -> bool:
        if self._stop_at is None:
            return False
        return self._volume is None or not self._queue.left or self._clock() >= self._stop_at

    def _turn(self) -> None:
        errand = self._queue.next_errand()
        if errand is not None:
            errand()
        elif self._volume is None and not self._open():
            self._skip()
            self._tell_idle()
            self._queue.rest(max(0.0, self._retry_at - self._clock()))
        elif self._write_next() or self._refill() or self._advance_sweep():
            return
        else:
            self._note_uses()
            self._tell_idle()
            self._queue.wait(None)
            self._queue.rest(SETTLE_S)  # the uses of a busy moment become one transaction

    def _tell_idle(self) -> None:
        told, self._told_when_idle = self._told_when_idle, []
        for done in told:
            if done.set_running_or_notify_cancel():
                done.set_result(None)

    def check(self) -> None:
        """An errand: pauses if the directory has gone."""
        if self._volume is not None:
            self._there()

    def distrust_index(self) -> None:
        """An errand: a reader found the index broken, so it is made again."""
        raise sqlite3.DatabaseError("the index is broken")

    # -- opening and pausing ------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        if self._retry_at and self._clock() < self._retry_at:
            return False
        try:
            self._volume = Volume(self._place, self._disk, index_is_broken=self._index_is_broken)
        except ReadOnly as error:
            self._pause(error.reason, state="read_only")
            return False
        except Unavailable as error:
            self._pause(error.reason)
            return False
        self._index_is_broken = False
        self.files.counts["index_rebuilt"] += self._volume.index_was_lost
        self._sweep = sweep(self._volume, self._disk, self.files.counts)
        self._opened(self._volume)
        self._good()
        return True

    def _good(self, *, written: bool = False) -> None:
        """The directory answers. After a failed write only a write proves that it is well again."""
        if self._volume is None or (self._must_prove and not written):
            return
        if self.condition.state in ("paused", "read_only"):
            log.info("the cache on disk is in use again: %s", self._place.directory)
        self._must_prove = False
        if written:
            self._failures = 0
        self.condition = Condition("on", None, self._volume.index.used_bytes)

    def _pause(self, reason: str, *, state: str = "paused") -> None:
        if self.condition.state != state:
            log.warning("the cache on disk is %s: %s", state.replace("_", " "), reason)
        self.condition = Condition(state, reason, self.condition.used_bytes)
        self._retry_at = self._clock() + RETRY_S[min(self._failures, len(RETRY_S) - 1)]
        self._failures += 1

    def _trouble(self, error: Exception) -> None:
        """The disk or the index failed: closes them, to begin again later."""
        if not isinstance(error, (OSError, sqlite3.Error, Unavailable)):
            log.error("the cache writer failed; it pauses", exc_info=error)
        # An OperationalError is no room or no access; the others say that the file itself is broken.
        self._index_is_broken = isinstance(error, sqlite3.DatabaseError) and not isinstance(
            error, sqlite3.OperationalError
        )
        self._must_prove = True
        self.files.counts["failures"] += 1
        self._queue.miss()
        volume, self._volume, self._sweep = self._volume, None, None
        if volume is not None:
            volume.close()
        self._pause(_said(error))

    def _skip(self) -> None:
        """While paused nothing waits: blocks stay in memory, to be asked for again if they still are there then."""
        while self._queue.next_job() is not None:
            self._queue.miss()
        self._queue.take_used()

    # -- writing ------------------------------------------------------------------------------------------------------

    def _write_next(self) -> bool:
        """Writes the record that has waited longest; returns whether there was one."""
        job = self._queue.next_job()
        if job is None:
            return False
        began = self._clock()
        written = self._write_one(job)
        # And not before: until it is in the index, only the queue can say where it is.
        self._queue.done(on_disk=written != "refused")
        if self._stop_at is None and not self._told_when_idle:
            self._queue.breathe(REST * max(0.0, self._clock() - began))
        return True

    def _write_one(self, job: Job) -> Written:
        volume = self._there()
        volume.index.begin()
        written = self.files.write(volume, job)
        volume.index.commit()
        self._good(written=written == "new")
        return written

    def _there(self) -> Volume:
        volume = self._volume
        if volume is None or not volume.is_there:
            raise FileNotFoundError(errno.ENOENT, "the directory has gone", str(self._place.directory))
        return volume

    def sweep_now(self, volume: Volume) -> int:
        """Sets index and files straight at once; returns how much there was to do."""
        counts: Counter[str] = Counter()
        volume.index.begin()
        for _ in sweep(volume, self._disk, counts):
            pass
        volume.index.commit()
        self.files.counts.update({name: counts[name] for name in counts if name not in ("foreign", "incompatible")})
        return counts["files_without_entry"] + counts["entries_without_file"] + counts["leftovers"] + counts["bad"]

    @property
    def volume(self) -> Volume:
        """For errands. Raises Unavailable while there is none."""
        if self._volume is None and not self._open():
            raise Unavailable(self.condition.reason or "the cache on disk is not open")
        return self._there()

    def set_limits(self, limits: Limits) -> None:
        """From any thread: what is over them goes as soon as there is nothing else to do."""
        self.files.limits = limits

        def make_room(volume: Volume) -> None:
            volume.index.begin()
            self.files.make_room(volume, 0)
            volume.index.commit()
            self._good()

        self.run(make_room)

    def remove_all(self, volume: Volume, identity: str) -> int:
        """An errand: takes away everything of one model that nothing holds; returns its bytes."""
        freed = self.files.remove_all(volume, identity)
        self._good()
        return freed

    # -- when there is nothing to write -------------------------------------------------------------------------------

    def _advance_sweep(self) -> bool:
        if self._volume is None or self._sweep is None or self._stop_at is not None:
            return False
        self._volume.index.begin()
        if next(self._sweep, self) is self:
            self._sweep = None
            self.files.make_room(self._volume, 0)
        self._volume.index.commit()
        self._good()
        return True

    def _refill(self) -> bool:
        """Asks one cache for some of what was refused while the queue was full; returns whether there was anything."""
        if not self._queue.has_missed:
            return False
        for identity, (model, source) in list(self.sources.items()):
            names = self._queue.take_missed(identity, REFILL)
            if names:
                self._write_again(model, names, source(names))
                return True
        self.files.counts["dropped"] += self._queue.forget_missed(self.sources)
        return False

    def _write_again(self, model: Model, names: Collection[Name], offers: Sequence[Offer]) -> None:
        self.files.drop(model, len(names) - len(offers))
        for index, offer in enumerate(offers):
            if self._stop_at is not None and self._clock() >= self._stop_at:
                self._queue.note_missed(model.identity, [rest.name for rest in offers[index:]])
                for rest in offers[index:]:
                    rest.tell(False)
                return
            self._queue.offer(model, offer, always=True)
            while self._write_next():
                pass

    def _note_uses(self) -> None:
        used = self._queue.take_used()
        if used and self._volume is not None:
            self._volume.index.begin()
            self._volume.index.use(used, self._clock())
            self._volume.index.commit()


def _said(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or type(error).__name__}"
    return f"its index: {error}" if isinstance(error, sqlite3.Error) else type(error).__name__
