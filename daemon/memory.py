"""What `memory.*` does: the status, the limits that are in force, and the enforcer's life.

Lives on the event loop; the enforcer's thread begins and ends with the service. Owns the policy: the settings' at the
start, another one after `memory.set` or a reload.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from omlxd.cache.hot import HotTier
from omlxd.daemon.enforcer import Enforcer, EnforcerThread
from omlxd.daemon.events import EventHub
from omlxd.daemon.footprint import MemoryProbe
from omlxd.daemon.relief import PoolRelief
from omlxd.engine.api import (
    InvalidParams,
    MemoryAction,
    MemoryCeilings,
    MemoryHolder,
    MemoryMarks,
    MemoryStatus,
)
from omlxd.engine.backend import MlxBackend
from omlxd.engine.guard import Helpers, MemoryGuard
from omlxd.engine.limits import MemoryLimits, MemoryPolicy
from omlxd.engine.pool import Pool

HOT_PERCENT = 10  # of the memory limit, for stored prefixes
LEAST_LIMIT_BYTES = 64 * 2**20  # as of the setting


class Memory:
    """The memory guard as clients see it."""

    def __init__(
        self,
        pool: Pool,
        guard: MemoryGuard,
        backend: MlxBackend,
        events: EventHub,
        probe: MemoryProbe,
        policy: MemoryPolicy,
        *,
        hot_bytes: int | None,
    ) -> None:
        """Made on the event loop. `hot_bytes` is the hot tier's budget; None: a share of the memory limit."""
        self._pool = pool
        self._guard = guard
        self._backend = backend
        self._events = events
        self._probe = probe
        self._hot_bytes = hot_bytes
        self._loop = asyncio.get_running_loop()
        tier: HotTier = backend.tier
        guard.ledger.watch("stored prefixes", "hot", lambda: tier.stats().used_bytes)
        guard.ledger.watch("prefixes on their way to disk", "writing", lambda: backend.queued_bytes)
        self._relief = PoolRelief(pool, guard, tier, lambda: backend.allocator, self._hot_target)
        self._enforcer = Enforcer(
            probe,
            guard,
            self._relief,
            policy,
            allocator=lambda: backend.allocator,
            on_event=self._tell,
        )
        guard.set_process_bytes(probe.footprint())
        self._thread = EnforcerThread(self._poll)
        guard.helped_by(
            Helpers(
                shrink_cache=self._relief.shrink_cache,
                unload_idle=self._relief.unload_idle_soon,
                stir=self._thread.wake,
                freed=self._enforcer.expect,
                footprint=probe.footprint,
            )
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._thread.stop()

    @property
    def footprint_bytes(self) -> int:
        return self._probe.footprint()

    def status(self) -> MemoryStatus:
        """A reading of now, with what was done lately."""
        self._pool.forget_returned()
        limits, ledger = self._enforcer.read(), self._guard.ledger
        return MemoryStatus(
            footprint_bytes=self._probe.footprint(),
            ledger_bytes=limits.ledger,
            pool_bytes=self._backend.allocator.pool_bytes(),
            difference_bytes=limits.measured - limits.ledger,
            level=_level(limits),
            limits=MemoryMarks(limits.soft, limits.hard, limits.abort),
            ceilings=MemoryCeilings(limits.ceilings.static, limits.ceilings.dynamic, limits.ceilings.metal),
            binding=limits.binding,
            tier=limits.tier,
            entries=[MemoryHolder(entry.owner, entry.kind, entry.bytes) for entry in ledger.entries()],
            actions=self._enforcer.actions,
        )

    def set(self, tier: Literal["safe", "balanced", "aggressive"] | None, limit_bytes: int | None) -> MemoryStatus:
        """Another tier, which ends a limit in bytes, or another limit. The ladder starts at once if need be."""
        if (tier is None) == (limit_bytes is None):
            raise InvalidParams("tier", "give exactly one of tier and limit_bytes")
        if limit_bytes is not None and limit_bytes < LEAST_LIMIT_BYTES:
            raise InvalidParams("limit_bytes", f"{limit_bytes} is less than {LEAST_LIMIT_BYTES}, the smallest limit")
        self.set_policy(MemoryPolicy("custom", limit_bytes) if tier is None else MemoryPolicy(tier))
        return self.status()

    def set_policy(self, policy: MemoryPolicy) -> None:
        self._enforcer.set_policy(policy)
        self._thread.wake()

    # -- the enforcer's thread ----------------------------------------------------------------------------------------

    def _poll(self) -> float:
        delay = self._enforcer.poll()
        self._relief.fit_hot(self._guard.limits)
        return delay

    def _hot_target(self, limits: MemoryLimits) -> int:
        share = limits.ceilings.steady * HOT_PERCENT // 100
        return share if self._hot_bytes is None else self._hot_bytes

    def _tell(self, action: MemoryAction, limits: MemoryLimits) -> None:
        def publish() -> None:
            self._events.publish(
                "memory",
                what=action.what,
                why=action.why,
                bytes=action.bytes,
                level=_level(limits),
                usage_bytes=limits.usage,
                binding=limits.binding,
            )

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(publish)


def _level(limits: MemoryLimits) -> Literal["OK", "SOFT", "HARD"]:
    name: Literal["OK", "SOFT", "HARD"] = limits.level.name  # type: ignore[assignment]
    return name
