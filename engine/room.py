"""Room for a model: its bytes are reserved before it loads, and others make way for it, idle ones first.

Lives on the event loop; no lock is held while it waits, and several loads may wait at once. Stored prefixes go first,
then idle models, least recently used first; a busy model is asked to finish what it has and then goes, so that two
models that fit only one at a time take turns and neither starves. Pinned models stay.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from omlxd.engine.api import MemoryExceeded, Progress
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.ledger import Reservation
from omlxd.engine.loading import Loading
from omlxd.engine.slot import Slot

LOOK_AGAIN_S = 0.25  # memory also comes back without any model's doing
PATIENCE_S = 5.0  # with nothing on its way that could make room
LONGEST_S = 600.0


class Leaving(Protocol):
    """How the pool lets a model go. Each ends when the model has gone, or raises an OmlxError."""

    def __call__(self, slot: Slot) -> Coroutine[Any, Any, object]: ...


class Room:
    """Makes room for loads."""

    def __init__(self, guard: MemoryGuard, slots: Callable[[], Iterable[Slot]], leave: Leaving) -> None:
        """`leave` drains a model and takes it out."""
        self._guard = guard
        self._slots = slots
        self._leave = leave
        self._leaving: dict[str, asyncio.Task[object]] = {}

    async def reserve(self, slot: Slot, nbytes: int, loading: Loading) -> Reservation:
        """Reserves a model's weights. Raises MemoryExceeded, or GivenUp when nobody waits for the load any more."""
        self._guard.stir()
        began = idle_since = _now()
        while True:
            loading.check()
            self._guard.shrink_cache(nbytes)
            reservation = self._guard.reserve(slot.entry.name, "load", nbytes)
            if reservation is not None:
                return reservation
            refused = self._refusal(slot, nbytes)
            if refused is not None:
                raise refused
            if self._ask_one(slot):
                idle_since = _now()
            loading.tell(Progress("held", 0, nbytes, "waits for memory"))
            if _now() - idle_since > PATIENCE_S or _now() - began > LONGEST_S:
                raise self._gave_up(slot, nbytes)
            await asyncio.sleep(LOOK_AGAIN_S) if not self._leaving else await self._one_left()

    def idle(self, but: Slot | None = None) -> Slot | None:
        """The least recently used model that is loaded, not pinned, and neither used nor just waited for."""
        return _oldest(each for each in self._slots() if each.is_idle and not each.pinned and each is not but)

    def _ask_one(self, wanting: Slot) -> bool:
        """Has one model leave, unless one is about to; whether one is."""
        self._leaving = {name: task for name, task in self._leaving.items() if not task.done()}
        if self._leaving or any(each.state in ("DRAINING", "UNLOADING") for each in self._slots()):
            return True
        busy = (each for each in self._slots() if each.state == "BUSY" and not each.pinned and each is not wanting)
        victim = self.idle(wanting) or _oldest(busy)
        if victim is not None:
            task = asyncio.ensure_future(self._leave(victim))
            task.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # it stays: then it is asked again
            self._leaving[victim.entry.name] = task
        return victim is not None or any(_reads(each) for each in self._slots() if each is not wanting)

    async def _one_left(self) -> None:
        await asyncio.wait(self._leaving.values(), timeout=LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)

    def _refusal(self, slot: Slot, nbytes: int) -> MemoryExceeded | None:
        pinned = sorted(self._guard.pinned - {slot.entry.name})
        unpin = f"unpin {', '.join(pinned)}, " if pinned else ""
        advice = f"{unpin}raise memory.limit_bytes, or use a smaller or quantised version of it"
        return self._guard.refusal(f"loading {slot.entry.name}", nbytes, advice=advice)

    def _gave_up(self, slot: Slot, nbytes: int) -> MemoryExceeded:
        advice = "nothing more can be freed now; try again later, or raise memory.limit_bytes"
        return self._guard.gave_up(f"loading {slot.entry.name}", nbytes, advice=advice)


def _oldest(slots: Iterable[Slot]) -> Slot | None:
    return min(slots, key=lambda slot: slot.last_used or slot.loaded_at or -math.inf, default=None)


def _reads(slot: Slot) -> bool:
    """Whether it has its room and loads: then there is a model that can be asked to leave, soon.

    One that waits for room has nothing to give; two of these would keep each other waiting.
    """
    return slot.state == "LOADING" and slot.memory is not None


def _now() -> float:
    return asyncio.get_running_loop().time()
