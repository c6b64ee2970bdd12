"""The guard: whether work may have the memory that it needs, now or ever. One answer for every path to the GPU.

Shared by all engines, the pool and the enforcer, on any thread. Owns the ledger and the one reference to the limits,
which the enforcer swaps; between two readings the use of memory is the last reading plus what the ledger has moved
since. The hot tier is counted once, as use; what of it could go is freed by asking, not by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from omlxd.engine.api import MemoryExceeded
from omlxd.engine.ledger import Kind, Ledger, Reservation
from omlxd.engine.limits import UNLIMITED, MemoryLimits

PROCESS = "omlxd"


@dataclass(frozen=True, slots=True)
class Helpers:
    """What the guard has others do, on whichever thread asks; all return at once.

    `shrink_cache` frees about so many bytes of stored prefixes. `unload_idle` takes one idle model out, in its own
    time. `stir` has the limits looked at anew. `freed` says that so many bytes of arrays have just gone. `footprint`
    is this process's.
    """

    shrink_cache: Callable[[int], object] = lambda nbytes: None
    unload_idle: Callable[[], object] = lambda: None
    stir: Callable[[], object] = lambda: None
    freed: Callable[[int], object] = lambda nbytes: None
    footprint: Callable[[], int] = lambda: 0


class MemoryGuard:
    """Owns the ledger; `limits` is swapped as a whole and read once per step."""

    def __init__(self, ledger: Ledger | None = None, limits: MemoryLimits = UNLIMITED) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self.limits = limits
        self.pinned: frozenset[str] = frozenset()  # models that stay; swapped by the pool
        self._helpers = Helpers()
        self._process: Reservation | None = None

    def helped_by(self, helpers: Helpers) -> None:
        """Who frees, measures and is told. Set once, when the daemon is put together."""
        self._helpers = helpers

    def set_process_bytes(self, nbytes: int) -> None:
        """What the interpreter and its libraries take when no model is there: named, so that the rest adds up."""
        if self._process is None:
            self._process = self.ledger.hold(PROCESS, "process", nbytes)
        else:
            self._process.resize(nbytes)

    def weigh_process(self) -> None:
        """Takes the process's own bytes anew: libraries have been loaded, and no model yet."""
        self.set_process_bytes(self._helpers.footprint())

    @property
    def process_bytes(self) -> int:
        return 0 if self._process is None else self._process.nbytes

    # -- now ----------------------------------------------------------------------------------------------------------

    @property
    def usage(self) -> int:
        return self.limits.usage_at(self.ledger.total())

    def room(self) -> int:
        """Bytes up to the soft mark; negative above it."""
        return self.limits.soft - self.usage

    def reserve(self, owner: str, kind: Kind, nbytes: int) -> Reservation | None:
        """Reserves up to the soft mark, or None. Where nothing more can be freed anyway, up to the hard one."""
        limits = self.limits
        return self.reserve_up_to(limits.hard if limits.orders.exhausted else limits.soft, owner, kind, nbytes)

    def reserve_up_to(self, mark: int, owner: str, kind: Kind, nbytes: int) -> Reservation | None:
        """Reserves if the use of memory stays at most `mark`."""
        limits = self.limits
        return self.ledger.reserve(owner, kind, nbytes, lambda total: limits.usage_at(total) <= mark)

    def shrink_cache(self, nbytes: int) -> None:
        """Makes room for work of `nbytes` out of stored prefixes, as far as they go."""
        missing = nbytes - self.room()
        if missing > 0:
            self._helpers.shrink_cache(missing)

    def want_room(self, nbytes: int) -> None:
        """Work of `nbytes` waits: whoever can free something without loss does, at once or soon."""
        self.shrink_cache(nbytes)
        if nbytes > self.room():
            self._helpers.unload_idle()

    def stir(self) -> None:
        """Something begins: a load, or the first request after a rest."""
        self._helpers.stir()

    def freed(self, nbytes: int) -> None:
        """So many bytes of arrays have just gone; the footprint may follow later."""
        self._helpers.freed(nbytes)

    # -- ever ---------------------------------------------------------------------------------------------------------

    def most(self, *, staying: Collection[str] = ()) -> int:
        """The largest work that could ever be admitted beside what stays: the process, pinned models and `staying`."""
        weights = self.ledger.held(["weights"]) - self.ledger.held(["weights"], but=[*staying, *self.pinned])
        return max(0, self.limits.steady_soft - self.process_bytes - weights)

    def refusal(self, what: str, nbytes: int, *, advice: str, staying: Collection[str] = ()) -> MemoryExceeded | None:
        """Why work of `nbytes` could never be done, beside the models in `staying`; None if it could."""
        most = self.most(staying=staying)
        if nbytes <= most:
            return None
        ceilings = self.limits.ceilings
        binding = "static" if ceilings.static <= ceilings.steady else "metal"
        return MemoryExceeded(what, needed_bytes=nbytes, limit_bytes=most, binding=binding, advice=advice)

    def gave_up(self, what: str, nbytes: int, *, advice: str) -> MemoryExceeded:
        """Why work that could be done another time is not done now."""
        limits = self.limits
        return MemoryExceeded(
            what, needed_bytes=nbytes, limit_bytes=max(0, self.room()), binding=limits.binding, advice=advice
        )
