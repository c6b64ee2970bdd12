"""Whether anything is left to answer: a count that can be waited for.

Owned by a connection, on the event loop; the server's drain reads it.
"""

from __future__ import annotations

import time

import anyio


class Activity:
    """How many answers are due. `end` follows each `begin` when the answer is written or nobody wants it."""

    def __init__(self) -> None:
        self._due = 0
        self.ended_at = time.monotonic()  # the last time that an answer was done with
        self._idle = anyio.Event()
        self._idle.set()

    @property
    def is_idle(self) -> bool:
        return self._due == 0

    def begin(self) -> None:
        if self._due == 0:
            self._idle = anyio.Event()
        self._due += 1

    def end(self) -> None:
        self._due -= 1
        self.ended_at = time.monotonic()
        if self._due == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()
