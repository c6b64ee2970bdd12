"""The hot tier: one byte budget for the blocks and checkpoints of all models, and who has to go when it is full.

One lock, `HotTier.lock`, guards the tier's numbers and every prefix tree whose entries it counts. Whoever walks or
changes a tree holds it: each model's engine thread (through its PrefixCache) for its own tree, and any thread that
makes room (an engine that publishes, the enforcer that shrinks), because the least recently used entry may belong to
another model. So eviction is a plain, immediate act that needs no other thread's help, and a deadlock is impossible:
no other lock of this room is ever held at the same time. Only dicts and integers are touched under it, never MLX;
evicted arrays are handed out and dropped after it, by whichever thread evicted them. That is safe: dropping computes
nothing, and a block that is just being published is kept alive by its own thread until it is evaluated.

Methods named `*_locked` expect the caller to hold the lock; the others take it.
"""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass
from typing import Protocol

from omlxd.cache.errors import CacheInvariantError


class Entry(Protocol):
    """Something in memory that a tree holds: a block or a checkpoint. Its tree and the tier change it, nobody else."""

    nbytes: int
    pins: int
    last_use: int
    alive: bool
    offers: int  # to the tier on disk, that it has not answered yet
    on_disk: bool  # as far as was heard; it may have gone from there since

    @property
    def is_leaf(self) -> bool:
        """Nothing stored depends on it, so it may go."""
        ...

    def unlink(self) -> Entry | None:
        """Leaves its tree; returns what it hung on, if that is an entry too."""
        ...


@dataclass(frozen=True, slots=True)
class TierStats:
    """Bytes of the tier. `pinned` and `cached` (evictable, now or when what hangs on it has gone) make up `used`.

    `offered` are those of `used` whose arrays the tier on disk has in its queue, too.
    """

    budget_bytes: int
    pinned_bytes: int
    cached_bytes: int
    offered_bytes: int
    entries: int
    evicted: int
    evicted_bytes: int
    refused: int

    @property
    def used_bytes(self) -> int:
        return self.pinned_bytes + self.cached_bytes

    @property
    def free_bytes(self) -> int:
        """Negative while live requests have more pinned: after a shrink, or to restore what is longer than the tier."""
        return self.budget_bytes - self.used_bytes


class HotTier:
    """Owns the budget; counts entries, never looks into them."""

    def __init__(self, budget_bytes: int) -> None:
        """`budget_bytes` may be zero: then nothing is kept."""
        self.lock = threading.Lock()
        self._budget = budget_bytes
        self._entries: dict[int, Entry] = {}  # by last use, which no two have in common
        self._used = self._pinned = self._offered = 0
        self._clock = 0
        self._evicted = self._evicted_bytes = self._refused = 0
        # A heap of last uses. One is stale when nothing has it any more, or what has it may not go now. It holds no
        # entries, for a stale one would keep its arrays.
        self._oldest: list[int] = []

    # -- under the caller's lock --------------------------------------------------------------------------------------

    @property
    def budget_locked(self) -> int:
        return self._budget

    @property
    def is_overdrawn_locked(self) -> bool:
        return self._used > self._budget

    def make_room_locked(self, nbytes: int) -> tuple[bool, list[Entry]]:
        """Evicts until `nbytes` more fit. Returns whether they do, and what went: drop it after the lock."""
        gone: list[Entry] = []
        while self._used + nbytes > self._budget:
            victim = self._pop_oldest()
            if victim is None:
                self._refused += nbytes > 0
                return False, gone
            self._evict(victim)
            gone.append(victim)
        return True, gone

    def add_locked(self, entry: Entry) -> None:
        """Counts an entry as the one used last. Its bytes have room, or it is pinned before the lock is let go."""
        self._used += entry.nbytes
        self._pinned += entry.nbytes if entry.pins else 0
        self._offered += entry.nbytes if entry.offers else 0
        self._use(entry)

    def remove_locked(self, entry: Entry) -> None:
        """Takes an entry out, whatever its pins; its holders keep their arrays. Does nothing the second time."""
        if not entry.alive:
            return
        entry.alive = False
        del self._entries[entry.last_use]
        self._used -= entry.nbytes
        self._pinned -= entry.nbytes if entry.pins else 0
        self._offered -= entry.nbytes if entry.offers else 0
        above = entry.unlink()
        if above is not None:
            self._enlist(above)

    def resized_locked(self, entry: Entry, before: int) -> None:
        """The entry's arrays were replaced by others; it had `before` bytes."""
        self._used += entry.nbytes - before
        self._pinned += entry.nbytes - before if entry.pins else 0
        self._offered += entry.nbytes - before if entry.offers else 0

    def offered_locked(self, entry: Entry) -> None:
        """The entry's arrays are offered to the tier on disk, which answers once, with `settle`."""
        self._offered += entry.nbytes if entry.alive and not entry.offers else 0
        entry.offers += 1

    def touch_locked(self, entry: Entry) -> None:
        """The entry was used now."""
        del self._entries[entry.last_use]
        self._use(entry)

    def pin_locked(self, entry: Entry) -> None:
        self._pinned += entry.nbytes if entry.alive and not entry.pins else 0
        entry.pins += 1

    def unpin_locked(self, entry: Entry) -> None:
        if entry.pins < 1:
            raise CacheInvariantError("an entry was released more often than it was pinned")
        entry.pins -= 1
        if entry.alive and not entry.pins:
            self._pinned -= entry.nbytes
            self._enlist(entry)

    def _use(self, entry: Entry) -> None:
        self._clock += 1
        entry.last_use = self._clock
        self._entries[self._clock] = entry
        self._enlist(entry)

    def _enlist(self, entry: Entry) -> None:
        """Lets eviction find an entry that may go. Called whenever one has become a leaf, unpinned or used."""
        if not _evictable(entry):
            return
        heapq.heappush(self._oldest, entry.last_use)
        if len(self._oldest) > 4 * len(self._entries) + 64:  # mostly stale
            self._oldest = [use for use, kept in self._entries.items() if _evictable(kept)]
            heapq.heapify(self._oldest)

    def _pop_oldest(self) -> Entry | None:
        while self._oldest:
            entry = self._entries.get(heapq.heappop(self._oldest))
            if entry is not None and _evictable(entry):
                return entry
        return None

    def _evict(self, entry: Entry) -> None:
        self._evicted += 1
        self._evicted_bytes += entry.nbytes
        self.remove_locked(entry)

    # -- on their own, from any thread --------------------------------------------------------------------------------

    def settle(self, entry: Entry, *, on_disk: bool) -> None:
        """The answer to one offer: whether the entry is on disk now."""
        with self.lock:
            entry.offers -= 1
            entry.on_disk = entry.on_disk or on_disk
            self._offered -= entry.nbytes if entry.alive and not entry.offers else 0

    def resize(self, budget_bytes: int) -> int:
        """Sets the budget and evicts down to it, as `shrink` does. Returns the bytes freed; what is pinned stays."""
        with self.lock:
            self._budget = budget_bytes
            freed, gone = self._give_up(self._used - budget_bytes)
        del gone
        return freed

    def shrink(self, nbytes: int) -> int:
        """Evicts about `nbytes` without lowering the budget, first what is on disk too. Returns the bytes freed."""
        with self.lock:
            freed, gone = self._give_up(nbytes)
        del gone
        return freed

    def _give_up(self, nbytes: int) -> tuple[int, list[Entry]]:
        """Evicts least recently used entries that the disk has, then others. Nothing is lost by the former."""
        gone: list[Entry] = []
        spared: list[int] = []
        freed = 0
        for only_on_disk in (True, False):
            while freed < nbytes and (victim := self._pop_oldest()) is not None:
                if only_on_disk and not victim.on_disk:
                    spared.append(victim.last_use)
                    continue
                freed += victim.nbytes
                self._evict(victim)
                gone.append(victim)
            while spared:
                heapq.heappush(self._oldest, spared.pop())
        return freed, gone

    def stats(self) -> TierStats:
        with self.lock:
            return TierStats(
                budget_bytes=self._budget,
                pinned_bytes=self._pinned,
                cached_bytes=self._used - self._pinned,
                offered_bytes=self._offered,
                entries=len(self._entries),
                evicted=self._evicted,
                evicted_bytes=self._evicted_bytes,
                refused=self._refused,
            )

    def check(self) -> None:
        """Raises CacheInvariantError unless the numbers are those of the entries."""
        with self.lock:
            entries = list(self._entries.values())
            used = sum(entry.nbytes for entry in entries)
            pinned = sum(entry.nbytes for entry in entries if entry.pins)
            offered = sum(entry.nbytes for entry in entries if entry.offers)
            listed = set(self._oldest)
            lost = [use for use, entry in self._entries.items() if _evictable(entry) and use not in listed]
            if (used, pinned, offered) != (self._used, self._pinned, self._offered):
                raise CacheInvariantError(
                    f"entries hold {used} ({pinned} pinned, {offered} offered),"
                    f" counted {self._used}, {self._pinned}, {self._offered}"
                )
            if not all(entry.alive and entry.last_use == use for use, entry in self._entries.items()):
                raise CacheInvariantError("an entry that has left its tree is still counted")
            if lost:
                raise CacheInvariantError(f"{len(lost)} evictable entries can never be found again")
            if self._used > self._budget and any(_evictable(entry) for entry in entries):
                raise CacheInvariantError(f"{self._used} bytes are held, {self._budget} is the limit, some could go")


def _evictable(entry: Entry) -> bool:
    return entry.alive and not entry.pins and entry.is_leaf
