"""How models leave the pool: drained, told to end, and accounted for when their engine has let go.

Lives on the event loop. Every wait here has an end: live requests have a deadline, and so has an engine; one that does
not end in time is given up, and what it has stays in the ledger under its name until it ends after all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from omlxd.engine.api import EngineFailed, ModelBusy
from omlxd.engine.deadlines import Deadlines
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.inbox import Close, Closed, Remains
from omlxd.engine.slot import EngineHandle, Slot
from omlxd.engine.unreturned import Unreturned

log = logging.getLogger(__name__)

Why = Literal["unloaded", "shutdown"]


class Departures:
    """Takes models out of the pool."""

    def __init__(
        self,
        guard: MemoryGuard,
        deadlines: Deadlines,
        *,
        on_lost: Callable[[Slot, EngineHandle], None],
        on_absent: Callable[[Slot], None],
    ) -> None:
        """`on_lost` is called as a slot loses its engine, `on_absent` when nothing is left of it in the pool."""
        self._guard = guard
        self._deadlines = deadlines
        self._on_lost = on_lost
        self._on_absent = on_absent
        self._unreturned = Unreturned(guard.ledger)
        self._tasks: set[asyncio.Task[Any]] = set()

    def watch(self, slot: Slot) -> None:
        """The slot has an engine now, which may end at any time."""
        engine = slot.running()
        engine.closed.add_done_callback(lambda closed: self._ended(slot, engine, closed.result()))

    def forget_returned(self) -> None:
        """Strikes out what was left behind and has gone since."""
        self._unreturned.look()

    async def drain(self, slot: Slot) -> None:
        """Waits for the live requests. New ones wait for the end of this and then load the model anew.

        Raises ModelBusy when they have not ended in time; the model then stays.
        """
        if slot.usable:
            slot.enter("DRAINING")
        try:
            async with asyncio.timeout(self._deadlines.drain_s):
                while slot.leases and slot.state == "DRAINING":
                    await slot.changed.wait()
        except TimeoutError:
            raise ModelBusy(slot.entry.name, slot.leases) from None
        finally:
            if slot.leases and slot.state == "DRAINING":  # the deadline passed, or the caller left
                slot.enter("BUSY")

    async def leave_for_another(self, slot: Slot) -> None:
        """Takes a model out for one that waits for room: it finishes what it has and begins nothing new."""
        log.info("unloading %s: another model needs its memory", slot.entry.name)
        await self.drain(slot)
        if slot.engine is not None:
            await self.take_out(slot, slot.engine, "unloaded")

    async def take_out(self, slot: Slot, engine: EngineHandle, why: Why) -> Closed:
        """Raises EngineFailed when the engine does not end in time."""
        self.tell_to_end(slot, engine, why)
        try:
            return await asyncio.wait_for(asyncio.shield(engine.closed), self._deadlines.let_go_s)
        except TimeoutError:
            raise EngineFailed(slot.entry.name, self._too_late) from None

    def tell_to_end(self, slot: Slot, engine: EngineHandle, why: Why) -> None:
        if slot.usable or slot.state == "DRAINING":
            slot.enter("UNLOADING")
            deadline = asyncio.get_running_loop().call_later(self._deadlines.let_go_s, self._give_up, slot, engine)
            engine.closed.add_done_callback(lambda closed: deadline.cancel())
            engine.close(Close(why))

    def expire_after_rest(self, slot: Slot) -> None:
        """An unpinned model that nobody uses goes when its TTL has passed without a request."""
        if slot.state == "READY" and slot.ttl_s > 0 and not slot.pinned:
            asyncio.get_running_loop().call_later(slot.ttl_s, self._expire, slot, slot.ttl_s, slot.last_used)

    def _expire(self, slot: Slot, ttl_s: float, last_used: float | None) -> None:
        is_due = slot.ttl_s == ttl_s and slot.last_used == last_used
        if slot.is_idle and is_due and not slot.pinned and slot.engine is not None:
            log.info("unloading %s: not used for %g s", slot.entry.name, slot.ttl_s)
            self._spawn(self.take_out(slot, slot.engine, "unloaded"))

    def _give_up(self, slot: Slot, engine: EngineHandle) -> None:
        """The engine has had its time; the model may be loaded anew without it, if there is memory for both."""
        if slot.engine is not engine or slot.state != "UNLOADING":
            return
        self._lose_engine(slot, engine, Remains("its engine, which does not end", engine.closed.done))
        slot.enter("FAILED", self._too_late)

    def _ended(self, slot: Slot, engine: EngineHandle, closed: Closed) -> None:
        slot.release_hooks()
        if slot.engine is not engine:  # given up before
            self._unreturned.look()
            return
        self._lose_engine(slot, engine, closed.remains)
        if closed.failure is None:
            slot.enter("ABSENT")
            self._on_absent(slot)
            log.info("unloaded %s; %d bytes came free", slot.entry.name, closed.freed_bytes)
        else:
            slot.enter("FAILED", closed.failure)
            log.error("the engine of %s ended: %s", slot.entry.name, closed.failure)

    def _lose_engine(self, slot: Slot, engine: EngineHandle, remains: Remains | None) -> None:
        self._on_lost(slot, engine)
        slot.engine = None
        slot.loaded_at = None
        if remains is None:
            self._guard.freed(slot.give_memory_back())
        else:
            log.error("%s was unloaded and is still held by %s", slot.entry.name, remains.holder)
            self.leave_behind(slot, remains)

    def leave_behind(self, slot: Slot, remains: Remains) -> None:
        """The slot goes without giving its memory back: somebody else has it."""
        self._unreturned.note(slot.entry.name, slot.give_memory_back(), remains)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)

    @property
    def _too_late(self) -> str:
        return f"its engine did not end within {self._deadlines.let_go_s:g} s"
