"""When an idle daemon may end: nothing was asked and nobody came or went for so long.

Owns the limit, which may change while it runs. Lives on the event loop; wakes once per limit at most, and never where
there is none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import anyio


class IdleClock:
    """`quiet_since` gives the moment since which nothing has happened, on `clock`, or None while something does."""

    def __init__(
        self, quiet_since: Callable[[], float | None], limit_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._quiet_since = quiet_since
        self._limit_s = limit_s
        self._clock = clock
        self._changed = anyio.Event()

    def set_limit(self, limit_s: float) -> None:
        """Seconds; 0 is never."""
        self._limit_s = limit_s
        self._changed.set()
        self._changed = anyio.Event()

    def left_s(self) -> float:
        """How long it must stay quiet still; not over 0 when the limit is reached, and the whole limit while busy."""
        if self._limit_s == 0:
            return math.inf
        since = self._quiet_since()
        return self._limit_s if since is None else since + self._limit_s - self._clock()

    async def wait(self) -> None:
        """Returns when the limit is reached. Others run in between, however often it is called."""
        await anyio.lowlevel.checkpoint()
        while (left_s := self.left_s()) > 0:
            with anyio.move_on_after(left_s):
                await self._changed.wait()
