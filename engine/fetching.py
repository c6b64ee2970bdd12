"""Prefixes on their way from the SSD tier: the requests that wait for them, and when waiting is no longer worth it.

Owned by the engine thread, which never waits here: files are read on the tier's own threads, and what they bring comes
back through the inbox, block by block, straight into the prefix cache. What the cache's budget has no room for is lent
to the request, on its own account, until it begins. A fetch ends when all is there, when a file is missing or bad, when
there is no memory for more, when reading turns out slower than computing, or when the disk has been silent for too
long. Then its request goes back to the line, and what has come is what it begins with.
"""

from __future__ import annotations

import sqlite3
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from omlxd.cache.errors import CacheError
from omlxd.engine.ledger import Reservation
from omlxd.engine.prefixes import Prefixes
from omlxd.engine.request import Clock, Request

if TYPE_CHECKING:
    from omlxd.cache.restoration import Restoration
    from omlxd.cache.ssd import ModelStore
    from omlxd.cache.ssd_format import Record
    from omlxd.cache.ssd_plan import Plan, Step

AHEAD = 4  # files asked for at once, and read before the speed is judged
SILENT_S = 2.0
PAUSE_S = 30.0  # how long a disk that was silent is not asked again

T = TypeVar("T")
Deliver = Callable[[Callable[[], None]], None]
Rate = Callable[[], float | None]


@dataclass(frozen=True, slots=True)
class Lender:
    """What a fetch asks of the engine's memory. `admit`: whether the request's own caches are reserved, or can be now.

    `lend` reserves so many bytes for what is read and has no room in the prefix cache's budget; None if there are none.
    """

    admit: Callable[[Request], bool]
    lend: Callable[[int], Reservation | None]


@dataclass(slots=True)
class _Fetch:
    """One request's fetch. `next` is the first step that has not been taken in; later ones may have come already."""

    request: Request
    restoration: Restoration
    store: ModelStore
    first: bytes  # the key of the first block that is not in memory
    moved_at: float
    began_at: float = 0.0
    steps: Sequence[Step] = ()
    asked: dict[int, Future[Record]] = field(default_factory=dict)
    come: dict[int, Record] = field(default_factory=dict)
    next: int = 0
    tokens: int = 0
    followers: list[Request] = field(default_factory=list)
    loan: Reservation | None = None  # for the steps that are still to come; those that have count where they are


class Fetching:
    """The requests in state FETCHING."""

    def __init__(
        self,
        store: ModelStore | None,
        prefixes: Prefixes,
        lender: Lender,
        *,
        deliver: Deliver,
        rate: Rate,
        clock: Clock,
    ) -> None:
        """`deliver` has something called on the engine thread, from any; `rate` is that of prefill, in tokens/s."""
        self._store = store
        self._prefixes = prefixes
        self._lender = lender
        self._deliver = deliver
        self._rate = rate
        self._clock = clock
        self._fetches: dict[str, _Fetch] = {}
        self._over: list[Request] = []
        self._done: set[str] = set()
        self._resumes_at = float("-inf")

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def requests(self) -> list[Request]:
        """All that wait here."""
        return [*self._over, *(each for fetch in self._fetches.values() for each in (fetch.request, *fetch.followers))]

    def get(self, id: str) -> Request | None:
        return next((request for request in self.requests if request.id == id), None)

    @property
    def wait_s(self) -> float | None:
        """After how long somebody has waited for long enough; None when nobody waits."""
        if not self._fetches:
            return None
        first = min(fetch.moved_at for fetch in self._fetches.values())
        return max(0.0, first + SILENT_S - self._clock())

    # -- beginning and ending -----------------------------------------------------------------------------------------

    def begin(self, request: Request) -> bool:
        """Starts looking on the disk for what memory lacks of the request's prefix; False if there is no reason to."""
        if self._store is None or request.id in self._done or not request.job.use_cache:
            return False
        if self._clock() < self._resumes_at:
            return False
        standing = self._prefixes.standing(request)
        if standing is None or standing.position >= standing.limit:
            return False
        first = standing.specs[standing.blocks].key if standing.blocks < len(standing.specs) else b""
        for fetch in self._fetches.values():
            if fetch.first == first:
                fetch.followers.append(request)
                return True
        restoration = self._prefixes.restoration(request)
        if restoration is None:
            return False
        fetch = _Fetch(request, restoration, self._store, first, self._clock())
        self._fetches[request.id] = fetch
        self._tell(self._store.plan(standing), fetch, Fetching._planned)
        return True

    def over(self) -> list[Request]:
        """Those who need not wait any longer, in order. They wait here no more."""
        for fetch in list(self._fetches.values()):
            if self._clock() - fetch.moved_at >= SILENT_S:
                self._resumes_at = self._clock() + PAUSE_S
                self._end(fetch)
        over, self._over = self._over, []
        return over

    def forget(self, request: Request) -> None:
        """The request has ended, or left its place: what it waits for is not needed; next time it may look again."""
        self._done.discard(request.id)
        self._over = [other for other in self._over if other is not request]
        for fetch in list(self._fetches.values()):
            if fetch.request is request:
                self._end(fetch)
                self._over.remove(request)
                self._done.discard(request.id)
            elif request in fetch.followers:
                fetch.followers.remove(request)

    def _end(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.request.id]
        for future in fetch.asked.values():
            future.cancel()
        self._done.add(fetch.request.id)
        self._over += [fetch.request, *fetch.followers]
        self._hand_over(fetch)

    def _hand_over(self, fetch: _Fetch) -> None:
        """What was lent stays until those who waited for it begin. The rest is in the cache, and need not be held."""
        if fetch.loan is None:
            fetch.restoration.release()
            return
        fetch.loan.release()
        waiting = [request for request in (fetch.request, *fetch.followers) if self._lender.admit(request)]
        self._prefixes.keep(fetch.restoration, waiting)

    # -- on the way ---------------------------------------------------------------------------------------------------

    def _tell(self, future: Future[T], fetch: _Fetch, came: Callable[[Fetching, _Fetch, T], None]) -> None:
        """Has `came` called on the engine thread with what the future gives, if the fetch still is under way then.

        What waits for the disk does not hold the engine, and with it the model: that may be unloaded meanwhile.
        """
        here, deliver = weakref.ref(self), self._deliver

        def arrived() -> None:
            fetching = here()
            if fetching is not None:
                fetching._arrived(future, fetch, came)

        future.add_done_callback(lambda _: deliver(arrived))

    def _arrived(self, future: Future[T], fetch: _Fetch, came: Callable[[Fetching, _Fetch, T], None]) -> None:
        if self._fetches.get(fetch.request.id) is not fetch:
            return
        fetch.moved_at = self._clock()
        try:
            result = future.result()
        except (CacheError, OSError, sqlite3.Error, CancelledError):
            self._end(fetch)  # counted where it happened; here it is a miss
            return
        came(self, fetch, result)

    def _planned(self, fetch: _Fetch, plan: Plan) -> None:
        fetch.steps = plan.steps
        fetch.began_at = self._clock()
        self._go_on(fetch)

    def _go_on(self, fetch: _Fetch) -> None:
        if fetch.next >= len(fetch.steps) or self._is_slow(fetch):
            self._end(fetch)
            return
        for index in range(fetch.next, min(fetch.next + AHEAD, len(fetch.steps))):
            if index not in fetch.asked:
                future = fetch.asked[index] = fetch.store.read(fetch.steps[index])
                self._tell(future, fetch, partial(Fetching._came, index=index))

    def _came(self, fetch: _Fetch, record: Record, *, index: int) -> None:
        fetch.come[index] = record
        while fetch.next in fetch.come:
            if not self._take(fetch, fetch.steps[fetch.next], fetch.come.pop(fetch.next)):
                self._end(fetch)  # there is no room for it in memory
                return
            fetch.tokens += fetch.steps[fetch.next].num_tokens
            fetch.next += 1
        self._go_on(fetch)

    def _take(self, fetch: _Fetch, step: Step, record: Record) -> bool:
        """Takes one record in; False if neither the cache nor the request has room for it."""
        is_lent, on_disk = fetch.loan is not None, step.record is None
        if not fetch.restoration.add(record, beyond_budget=is_lent, on_disk=on_disk):
            # The request's own caches come first: what it holds while it waits for them would be in its own way.
            if self._lender.admit(fetch.request):
                fetch.loan = self._lender.lend(sum(each.nbytes for each in fetch.steps[fetch.next :]))
            if fetch.loan is None:
                return False
            fetch.restoration.add(record, beyond_budget=True, on_disk=on_disk)
        if fetch.loan is not None:
            fetch.loan.resize(max(0, fetch.loan.nbytes - step.nbytes))
        return True

    def _is_slow(self, fetch: _Fetch) -> bool:
        """Whether the rest would sooner be computed than read, at the speeds measured."""
        rate = self._rate()
        elapsed_s = self._clock() - fetch.began_at
        if rate is None or fetch.next < AHEAD or elapsed_s <= 0:
            return False
        return fetch.tokens / elapsed_s < rate
