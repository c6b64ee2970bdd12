"""What can be done about memory pressure, done: stored prefixes, MLX's pool, idle models, requests.

Implements the ladder's `Relief` and the guard's `Helpers`. Called on the enforcer's thread and on engine threads; what
belongs to the event loop is done there, and waited for with a deadline, so that a busy loop costs a step and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from omlxd.cache.hot import HotTier
from omlxd.daemon.ladder import Relieved
from omlxd.engine.allocator import Allocator
from omlxd.engine.api import ModelEntry, RequestInfo
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.inbox import SHORT_OF_MEMORY, Preempt, Refuse
from omlxd.engine.limits import SOFT_LOW, Level, MemoryLimits
from omlxd.engine.pool import Pool
from omlxd.engine.slot import EngineHandle

LOOP_S: Final = 1.0  # how long the event loop may take to answer
LEAST_POOL_BYTES: Final = 2**20  # a pool smaller than this is not worth returning
_PLACED = ("PREFILL", "DECODE")
T = TypeVar("T")

Placed = tuple[ModelEntry, EngineHandle, RequestInfo]


class PoolRelief:
    """Relief by the pool's models, their requests, and the tier of stored prefixes."""

    def __init__(
        self,
        pool: Pool,
        guard: MemoryGuard,
        tier: HotTier,
        allocator: Callable[[], Allocator],
        hot_target: Callable[[MemoryLimits], int],
    ) -> None:
        """Made on the event loop. `hot_target` is the tier's budget when memory is no concern."""
        self._pool = pool
        self._guard = guard
        self._tier = tier
        self._allocator = allocator
        self._hot_target = hot_target
        self._loop = asyncio.get_running_loop()

    # -- the ladder ---------------------------------------------------------------------------------------------------

    def shrink_hot(self, nbytes: int) -> Relieved | None:
        freed = self._tier.shrink(nbytes)
        return Relieved(f"stored prefixes were dropped from memory, {freed} bytes", freed) if freed else None

    def return_pool(self) -> Relieved | None:
        if self._allocator().pool_bytes() < LEAST_POOL_BYTES:
            return None
        return Relieved("MLX's pool of free buffers was returned", self._allocator().return_pool())

    def unload_idle(self) -> Relieved | None:
        gone = self._on_loop(self._pool.unload_idle)
        return None if gone is None else Relieved(f"the idle model {gone[0]} is unloaded", gone[1], later=True)

    def preempt(self) -> Relieved | None:
        return self._on_loop(self._preempt)

    def fail_prefill(self) -> Relieved | None:
        return self._on_loop(self._fail_prefill)

    def _preempt(self) -> Relieved | None:
        placed = self._placed()
        if len(placed) < 2:
            return None
        model, engine, request = min(placed, key=_loses_least)
        engine.relieve(Preempt(request.id, SHORT_OF_MEMORY))
        return Relieved(f"request {request.id} of {model.name} is preempted", self._share(model, placed), later=True)

    def _fail_prefill(self) -> Relieved | None:
        placed = self._placed()
        reading = [each for each in placed if each[2].state == "PREFILL"]
        if not reading:
            return None
        model, engine, request = min(reading, key=lambda each: (each[0].pinned, each[2].age_s))
        nbytes = self._share(model, placed)
        advice = "memory is short and nothing else could be freed; send it again later, or raise memory.limit_bytes"
        engine.relieve(Refuse(request.id, self._guard.gave_up("the request", nbytes, advice=advice)))
        return Relieved(f"request {request.id} of {model.name} is ended", nbytes, later=True)

    def _placed(self) -> list[Placed]:
        """Every request that has a place in its engine."""
        running = self._pool.running()
        return [(model, engine, each) for model, engine in running for each in engine.requests if each.state in _PLACED]

    def _share(self, model: ModelEntry, placed: Sequence[Placed]) -> int:
        """About what one of the model's requests holds."""
        entries = self._guard.ledger.entries()
        held = sum(entry.bytes for entry in entries if entry.owner == model.name and entry.kind == "kv")
        return held // max(1, sum(each[0].name == model.name for each in placed))

    # -- the guard ----------------------------------------------------------------------------------------------------

    def shrink_cache(self, nbytes: int) -> None:
        """From any thread, at once: stored prefixes, and where they are not enough what the heap keeps for nobody."""
        if self._tier.shrink(nbytes) < nbytes:
            self._allocator().return_pool()

    def unload_idle_soon(self) -> None:
        """From any thread, at once."""
        self._loop.call_soon_threadsafe(self._pool.unload_idle)

    def fit_hot(self, limits: MemoryLimits) -> None:
        """Lets the tier grow into what is free below the marks and no further; it loses nothing by this."""
        used = self._tier.stats().used_bytes
        free = 0 if limits.level is not Level.OK else limits.ceilings.lowest * SOFT_LOW // 100 - limits.usage
        budget = min(self._hot_target(limits), used + max(0, free))
        if budget != self._tier.stats().budget_bytes:
            self._tier.resize(budget)

    def _on_loop(self, act: Callable[[], T | None]) -> T | None:
        """What `act` gives on the event loop; None when the loop does not get to it in time."""
        answer: Future[T | None] = Future()

        def call() -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(act())

        try:
            self._loop.call_soon_threadsafe(call)
            return answer.result(LOOP_S)
        except (TimeoutError, RuntimeError):  # the loop has ended
            answer.cancel()
            return None


def _loses_least(each: Placed) -> tuple[bool, bool, float]:
    """Pinned models' requests last, interactive ones after batch ones, the newest first."""
    model, _, request = each
    return model.pinned, request.priority != "batch", request.age_s
