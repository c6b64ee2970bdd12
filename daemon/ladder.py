"""The ladder: what is done about memory pressure, mildest first, one step at a time.

Decides which step is next and keeps the orders that stay in force until the pressure has passed; the steps themselves
are done by a `Relief`. Called by the enforcer, on its thread, once per poll; knows no clock and takes no reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from omlxd.engine.limits import SOFT_LOW, Level, MemoryLimits, Orders

LEAST_CHUNK_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Relieved:
    """A step that was done: to what or whom, and the bytes that come free by it, soon or at once.

    `later`: they leave the ledger only when another thread has done its part.
    """

    what: str
    bytes: int = 0
    later: bool = False


class Relief(Protocol):
    """What can be done. Each returns at once; None where there is nothing to do."""

    def shrink_hot(self, nbytes: int) -> Relieved | None:
        """Drops about so many bytes of stored prefixes, those that are on SSD too first."""
        ...

    def return_pool(self) -> Relieved | None: ...

    def unload_idle(self) -> Relieved | None:
        """The least recently used model that is not pinned and that nobody uses."""
        ...

    def preempt(self) -> Relieved | None:
        """The newest request of the lowest priority leaves its place; it goes on later from what is stored.

        Pinned models' requests last, and never the only request there is: nobody would gain by that.
        """
        ...

    def fail_prefill(self) -> Relieved | None:
        """Ends the newest request whose prompt is still being computed, with MemoryExceeded."""
        ...


class Ladder:
    """`orders` are what the engines are told."""

    def __init__(self, relief: Relief) -> None:
        self.orders = Orders()
        self._relief = relief
        # Each with the level from which on it is taken. Only the last takes something from a client.
        self._rungs: tuple[tuple[Level, Callable[[MemoryLimits], Relieved | None]], ...] = (
            (Level.SOFT, self._shrink_chunk),
            (Level.SOFT, self._stop_admitting),
            (Level.SOFT, self._shrink_hot),
            (Level.SOFT, lambda limits: relief.return_pool()),
            (Level.SOFT, lambda limits: relief.unload_idle()),
            (Level.HARD, lambda limits: relief.preempt()),
            (Level.HARD, self._fail_prefill),
        )

    def step(self, limits: MemoryLimits) -> Relieved | None:
        """Does the mildest thing that is left to do. None: nothing needs doing, or nothing can be done."""
        if limits.level is Level.OK:
            self.orders = Orders()
            return None
        for level, act in self._rungs:
            done = act(limits) if limits.level >= level else None
            if done is not None:
                self.orders = replace(self.orders, exhausted=False)
                return done
        self.orders = replace(self.orders, exhausted=True)
        return None

    def _shrink_chunk(self, limits: MemoryLimits) -> Relieved | None:
        share = self.orders.chunk_share / 2
        if share < LEAST_CHUNK_SHARE:
            return None
        self.orders = replace(self.orders, chunk_share=share)
        return Relieved(f"prefill turns are {share:.0%} of their size")

    def _stop_admitting(self, limits: MemoryLimits) -> Relieved | None:
        if not self.orders.admits:
            return None
        self.orders = replace(self.orders, admits=False)
        return Relieved("no request is admitted")

    def _shrink_hot(self, limits: MemoryLimits) -> Relieved | None:
        return self._relief.shrink_hot(limits.usage - limits.ceilings.lowest * SOFT_LOW // 100)

    def _fail_prefill(self, limits: MemoryLimits) -> Relieved | None:
        return self._relief.fail_prefill() if limits.usage > limits.abort else None
