"""Relief by the pool: whom the ladder preempts or ends, what it unloads, and how far the hot tier may grow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from omlxd.cache.hot import HotTier
from omlxd.daemon.ladder import Relieved
from omlxd.daemon.relief import PoolRelief
from omlxd.engine.api import LoadOptions, MemoryExceeded, RequestInfo
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.inbox import Preempt, Refuse
from omlxd.engine.limits import Ceilings, Level, judge
from omlxd.engine.pool import Pool
from tests.daemon.memory_fakes import FakeMachine
from tests.engine.test_pool import FakeBackend, FakeCatalog, FakeEngine, quiet


class BusyEngine(FakeEngine):
    """Remembers what it was asked to give up."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[Preempt | Refuse] = []

    def relieve(self, command: Preempt | Refuse) -> None:
        self.asked.append(command)


class BusyBackend(FakeBackend):
    def start(self, loaded: Any) -> FakeEngine:
        self.engines.append(BusyEngine(loaded.facts.name))
        return self.engines[-1]


def info(id: str, state: str, age_s: float, *, batch: bool = False) -> RequestInfo:
    return RequestInfo(id, "m", state, 10, 0, 0, age_s, None, "batch" if batch else "interactive")


class Scene:
    """Models a and b are loaded; `ask` calls the relief on another thread, as the enforcer does."""

    def __init__(self, *, pin: Sequence[str] = ()) -> None:
        self.pin = pin
        self.guard = MemoryGuard()
        self.backend = BusyBackend()
        self.tier = HotTier(1000)
        self.machine = FakeMachine()

    async def __aenter__(self) -> Scene:
        self.pool = Pool(FakeCatalog(), self.backend, guard=self.guard)  # type: ignore[arg-type]
        for name in ("a", "b"):
            await self.pool.load(name, LoadOptions(pin=name in self.pin), quiet)
        self.relief = PoolRelief(self.pool, self.guard, self.tier, lambda: self.machine, lambda limits: 500)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.pool.close()

    def requests(self, **by_model: Sequence[RequestInfo]) -> None:
        for engine in self.backend.engines:
            engine.requests = by_model.get(engine.facts.name, ())

    async def ask(self, what: Callable[[], Relieved | None]) -> Relieved | None:
        return await asyncio.to_thread(what)

    @property
    def asked(self) -> list[Preempt | Refuse]:
        return [
            command for engine in self.backend.engines if isinstance(engine, BusyEngine) for command in engine.asked
        ]


def test_the_newest_request_of_the_lowest_priority_is_preempted() -> None:
    async def main() -> None:
        async with Scene() as s:
            s.guard.ledger.hold("b", "kv", 600)
            s.requests(
                a=[info("a1", "DECODE", 1.0)],
                b=[info("b1", "DECODE", 9.0, batch=True), info("b2", "PREFILL", 5.0, batch=True)],
            )
            done = await s.ask(s.relief.preempt)
            assert [command.id for command in s.asked] == ["b2"]
            assert done is not None
            assert (done.bytes, done.later) == (300, True)

    asyncio.run(main())


def test_pinned_models_requests_are_the_last_to_suffer() -> None:
    async def main() -> None:
        async with Scene(pin=["b"]) as s:
            s.requests(a=[info("a1", "DECODE", 9.0)], b=[info("b1", "DECODE", 1.0, batch=True)])
            await s.ask(s.relief.preempt)
            assert [command.id for command in s.asked] == ["a1"]

    asyncio.run(main())


def test_the_only_request_there_is_is_not_preempted() -> None:
    async def main() -> None:
        async with Scene() as s:
            s.requests(a=[info("a1", "DECODE", 1.0), info("a2", "QUEUED", 0.5)])
            assert await s.ask(s.relief.preempt) is None

    asyncio.run(main())


def test_the_newest_prompt_is_ended_with_a_typed_error_and_no_decode_ever_is() -> None:
    async def main() -> None:
        async with Scene() as s:
            s.requests(a=[info("a1", "DECODE", 0.1), info("a2", "PREFILL", 3.0)], b=[info("b1", "PREFILL", 2.0)])
            await s.ask(s.relief.fail_prefill)
            (command,) = s.asked
            assert isinstance(command, Refuse)
            assert command.id == "b1"
            assert isinstance(command.error, MemoryExceeded)
            s.requests(a=[info("a1", "DECODE", 0.1)])
            assert await s.ask(s.relief.fail_prefill) is None

    asyncio.run(main())


def test_an_idle_model_is_unloaded_and_its_bytes_come_later() -> None:
    async def main() -> None:
        async with Scene(pin=["a"]) as s:
            done = await s.ask(s.relief.unload_idle)
            assert done is not None
            assert done.later
            assert "b" in done.what
            assert await s.ask(s.relief.unload_idle) is None

    asyncio.run(main())


def test_an_ended_loop_costs_a_step_and_no_more() -> None:
    scene = Scene()

    async def main() -> None:
        async with scene:
            pass

    asyncio.run(main())
    with suppress(TimeoutError):
        assert scene.relief.unload_idle() is None


def test_mlxs_pool_is_returned_when_it_is_worth_it() -> None:
    async def main() -> None:
        async with Scene() as s:
            s.machine.pool = 100
            assert s.relief.return_pool() is None
            s.machine.pool = 2**21
            assert s.relief.return_pool() == Relieved("MLX's pool of free buffers was returned", 2**21)

    asyncio.run(main())


def test_the_hot_tier_grows_into_what_is_free_and_keeps_what_it_has() -> None:
    async def main() -> None:
        async with Scene() as s:

            def budget_at(usage: int, level: Level = Level.OK) -> int:
                reading = judge(Ceilings(1000, 1000), tier="safe", measured=usage, ledger=0, before=level)
                s.relief.fit_hot(reading)
                return s.tier.stats().budget_bytes

            assert budget_at(100) == 500  # its target
            assert budget_at(600) == 250  # up to the soft low mark, 850
            assert budget_at(870) == 0
            assert budget_at(870, Level.SOFT) == 0

    asyncio.run(main())
