"""The ledger: who holds how many bytes of memory, and the reservations that come before the work.

Any thread may reserve, resize, release and read; one lock guards two dictionaries and some integers, and nothing else
happens under it. Work is reserved before it is submitted, because running out of memory on the GPU ends the process; a
reservation is given back exactly when its arrays have been dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from omlxd.engine.api import InvariantError

Kind = Literal["process", "weights", "load", "kv", "padding", "chunk", "pictures", "hot", "writing", "unreturned"]
Fits = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One holder's bytes of one kind; what it holds in several reservations is added up."""

    owner: str
    kind: Kind
    bytes: int


class Reservation:
    """Bytes that one holder has in the ledger. Made by `Ledger`; `release` it exactly when its arrays are gone."""

    __slots__ = ("_ledger", "kind", "nbytes", "owner")

    def __init__(self, ledger: Ledger, owner: str, kind: Kind, nbytes: int) -> None:
        self.owner = owner
        self.kind = kind
        self.nbytes = nbytes
        self._ledger = ledger

    def resize(self, nbytes: int) -> None:
        """What it stands for has turned out larger or smaller. Does nothing after the release."""
        self._ledger.resize(self, nbytes)

    def turn_into(self, kind: Kind, nbytes: int) -> None:
        """What it was reserved for is there now, and of another kind."""
        self._ledger.resize(self, nbytes, kind)

    def release(self) -> None:
        """Idempotent."""
        self._ledger.release(self)


class Ledger:
    """Everybody's reservations, and the holders that count for themselves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, Reservation] = {}
        self._total = 0
        self._gauges: dict[tuple[str, Kind], Callable[[], int]] = {}

    def watch(self, owner: str, kind: Kind, read: Callable[[], int]) -> None:
        """Counts a holder that keeps its own number. `read` is quick, and takes no lock of whoever calls the ledger."""
        with self._lock:
            self._gauges = {**self._gauges, (owner, kind): read}

    def hold(self, owner: str, kind: Kind, nbytes: int) -> Reservation:
        """Reserves whatever there is room for: for bytes that are there already, or that nothing can refuse."""
        reservation = Reservation(self, owner, kind, nbytes)
        with self._lock:
            self._add(reservation)
        return reservation

    def reserve(self, owner: str, kind: Kind, nbytes: int, fits: Fits) -> Reservation | None:
        """Reserves if `fits` says so of the total that it would come to; else None. Two callers never share room.

        `fits` is called under the lock: it compares numbers and does nothing else.
        """
        watched = self._watched()
        reservation = Reservation(self, owner, kind, nbytes)
        with self._lock:
            if not fits(self._total + watched + nbytes):
                return None
            self._add(reservation)
        return reservation

    def total(self) -> int:
        return self._total + self._watched()

    def held(self, kinds: Collection[Kind], *, but: Collection[str] = ()) -> int:
        """Bytes of some kinds of reservations, without those of some owners."""
        with self._lock:
            return sum(each.nbytes for each in self._held.values() if each.kind in kinds and each.owner not in but)

    def entries(self) -> Sequence[LedgerEntry]:
        """One line for each owner and kind, largest first; nothing that holds no bytes."""
        with self._lock:
            sums: dict[tuple[str, Kind], int] = {}
            for each in self._held.values():
                sums[each.owner, each.kind] = sums.get((each.owner, each.kind), 0) + each.nbytes
            gauges = self._gauges
        for key, read in gauges.items():
            sums[key] = sums.get(key, 0) + read()
        lines = [LedgerEntry(owner, kind, nbytes) for (owner, kind), nbytes in sums.items() if nbytes]
        return sorted(lines, key=lambda line: (-line.bytes, line.owner, line.kind))

    def check(self) -> None:
        """Raises InvariantError unless the total is that of the reservations and none is negative."""
        with self._lock:
            total = sum(each.nbytes for each in self._held.values())
            if total != self._total:
                raise InvariantError(f"the ledger's reservations come to {total} bytes, it counts {self._total}")
            negative = [each.owner for each in self._held.values() if each.nbytes < 0]
        if negative:
            raise InvariantError(f"the ledger has negative reservations of {', '.join(negative)}")

    # -- for Reservation ----------------------------------------------------------------------------------------------

    def resize(self, reservation: Reservation, nbytes: int, kind: Kind | None = None) -> None:
        with self._lock:
            if id(reservation) in self._held:
                self._total += nbytes - reservation.nbytes
                reservation.nbytes = nbytes
                reservation.kind = kind or reservation.kind

    def release(self, reservation: Reservation) -> None:
        with self._lock:
            if self._held.pop(id(reservation), None) is not None:
                self._total -= reservation.nbytes

    def _add(self, reservation: Reservation) -> None:
        self._held[id(reservation)] = reservation
        self._total += reservation.nbytes

    def _watched(self) -> int:
        # Outside the lock: a gauge takes its own holder's.
        return sum(read() for read in self._gauges.values())
