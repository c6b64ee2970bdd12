"""What `memory.status` names: every holder, those too that count for themselves."""

from __future__ import annotations

import asyncio

from omlxd.daemon.events import EventHub
from omlxd.daemon.memory import Memory
from omlxd.engine.backend import CacheOptions, MlxBackend
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.limits import MemoryPolicy
from omlxd.engine.pool import Pool
from omlxd.engine.scheduler import SchedulerLimits
from tests.daemon.memory_fakes import FakeMachine
from tests.engine.test_pool import FakeBackend, FakeCatalog


class Writing(MlxBackend):
    """Its disk is slow: 5000 bytes wait that memory has given up already."""

    @property
    def queued_bytes(self) -> int:
        return 5000


def test_what_waits_to_be_written_and_is_in_memory_no_more_has_an_entry_of_its_own() -> None:
    async def main() -> None:
        guard = MemoryGuard()
        backend = Writing(SchedulerLimits(), CacheOptions(enabled=True, block_size=16, hot_bytes=1000), guard)
        pool = Pool(FakeCatalog(), FakeBackend(), guard=guard)  # type: ignore[arg-type]
        machine, policy = FakeMachine(held=7000), MemoryPolicy("custom", 10_000)
        memory = Memory(pool, guard, backend, EventHub(), machine, policy, hot_bytes=None)
        status = memory.status()
        held = {(entry.owner, entry.kind): entry.bytes for entry in status.entries}
        assert held == {("omlxd", "process"): 7000, ("prefixes on their way to disk", "writing"): 5000}
        assert status.ledger_bytes == 12_000
        await pool.close()
        backend.close()

    asyncio.run(main())
