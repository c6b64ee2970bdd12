"""Models come and go one by one: shared loads, drains, refusals, and no model waits for another's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from omlxd.engine.api import (
    Cancelled,
    LoadOptions,
    ModelLoadFailed,
    ModelMetrics,
    ModelNotFound,
    Progress,
    Prompt,
    RequestInfo,
    ShuttingDown,
    Unsupported,
)
from omlxd.engine.catalog import CatalogEntry
from omlxd.engine.deadlines import Deadlines
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.hooks import Hook
from omlxd.engine.inbox import Close, Closed
from omlxd.engine.job import Job
from omlxd.engine.metrics import Meter
from omlxd.engine.model import LoadedModel, ModelFacts
from omlxd.engine.pool import Pool
from omlxd.engine.stream import EventStream

T = TypeVar("T")


def quiet(_: Progress) -> None: ...


class FakeCatalog:
    """Models a, b and c; `org/a` is another name of a."""

    def entry(self, name: str) -> CatalogEntry:
        return CatalogEntry(name, Path("/models") / name, "text", 1000)

    def scan(self) -> tuple[CatalogEntry, ...]:
        return tuple(self.entry(name) for name in "abc")

    def resolve(self, name: str) -> CatalogEntry:
        if name.rsplit("/", 1)[-1] not in ("a", "b", "c"):
            raise ModelNotFound(name)
        return self.entry(name.rsplit("/", 1)[-1])


class FakeEngine:
    merges_rows = True
    uncached: str | None = None

    def __init__(self, name: str) -> None:
        self.facts = ModelFacts(name, Path("/"), None, 10, frozenset(), False, 0)
        self.closed: asyncio.Future[Closed] = asyncio.get_running_loop().create_future()
        self.closes: list[str] = []
        self.requests: Sequence[RequestInfo] = ()
        self.meter = Meter(lambda: 0.0)

    @property
    def metrics(self) -> ModelMetrics:
        return self.meter.read()

    async def token_ids(self, prompt: Prompt) -> Sequence[int]:
        return []

    async def boundaries(self, prompt: Prompt, ids: Sequence[int]) -> Sequence[int]:
        return []

    async def text(self, token_ids: Sequence[int]) -> str:
        return ""

    async def ask_cache(self, question: Callable[[Any], T]) -> T:
        return question(None)

    def submit(self, job: Job, stream: EventStream) -> None: ...

    def abort(self, id: str, reason: str | None) -> None: ...

    def close(self, command: Close) -> None:
        self.closes.append(command.why)
        self.end(None)

    def end(self, failure: str | None) -> None:
        self.closed.set_result(Closed(failure, 1000))


class FakeBackend:
    """`gate` is waited for in every load; `before` may raise."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.engines: list[FakeEngine] = []
        self.started = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.before: Callable[[str], None] = lambda name: None

    def hooks(self, entry: CatalogEntry, options: LoadOptions) -> Sequence[Hook]:
        return ()

    def load(self, entry: CatalogEntry, options: LoadOptions, progress: Any) -> LoadedModel:
        self.loads.append(entry.name)
        self.started.set()
        progress(Progress("load", 0, 10))
        while not self.gate.wait(0.01):
            progress(Progress("load", 5, 10))
        self.before(entry.name)
        progress(Progress("load", 10, 10))
        facts = ModelFacts(entry.name, entry.path, None, 10, frozenset(), False, 0)
        return LoadedModel(None, None, facts)  # type: ignore[arg-type]

    def start(self, loaded: LoadedModel) -> FakeEngine:
        self.engines.append(FakeEngine(loaded.facts.name))
        return self.engines[-1]

    def close(self) -> None: ...


@asynccontextmanager
async def pool(backend: FakeBackend, **options: Any) -> AsyncIterator[Pool]:
    running = Pool(FakeCatalog(), backend, **options)  # type: ignore[arg-type]
    try:
        yield running
    finally:
        backend.gate.set()
        await asyncio.wait_for(running.close(), 10)


async def use(running: Pool, name: str, **options: Any) -> str:
    async with running.lease(name, **{"autoload": True, "progress": quiet, **options}) as engine:
        return engine.facts.name


def states(running: Pool) -> dict[str, str]:
    return {entry.name: entry.state for entry in running.loaded()}


def test_ten_first_requests_share_one_load() -> None:
    """PL-03."""

    async def main() -> None:
        backend = FakeBackend()
        async with pool(backend) as running:
            assert await asyncio.gather(*(use(running, "a") for _ in range(10))) == ["a"] * 10
        assert backend.loads == ["a"]

    asyncio.run(main())


def test_all_names_of_a_model_lead_to_one_engine() -> None:
    async def main() -> None:
        backend = FakeBackend()
        async with pool(backend) as running:
            await asyncio.gather(use(running, "a"), use(running, "org/a"))
        assert backend.loads == ["a"]

    asyncio.run(main())


@pytest.mark.parametrize("options", [LoadOptions(kv_bits=4), LoadOptions(draft="b")])
def test_what_a_load_cannot_do_is_refused_for_a_loaded_model_too(options: LoadOptions) -> None:
    async def main() -> None:
        async with pool(FakeBackend()) as running:
            await running.load("a", LoadOptions(), quiet)
            with pytest.raises(Unsupported):
                await running.load("a", options, quiet)

    asyncio.run(main())


def test_a_loaded_model_serves_while_another_one_loads() -> None:
    async def main() -> None:
        backend = FakeBackend()
        async with pool(backend) as running:
            await use(running, "a")
            backend.gate.clear()
            loading = asyncio.ensure_future(use(running, "b"))
            while "b" not in backend.loads:
                await asyncio.sleep(0.01)
            assert await asyncio.wait_for(use(running, "a"), 5) == "a"
            assert states(running) == {"a": "READY", "b": "LOADING"}
            backend.gate.set()
            assert await loading == "b"

    asyncio.run(main())


def test_everyone_who_waits_for_a_load_sees_its_progress() -> None:
    async def main() -> None:
        backend = FakeBackend()
        seen: list[list[Progress]] = [[], []]
        backend.gate.clear()
        async with pool(backend) as running:
            uses = [asyncio.ensure_future(use(running, "a", progress=sink.append)) for sink in seen]
            while not all(seen):
                await asyncio.sleep(0.01)
            backend.gate.set()
            await asyncio.gather(*uses)
        assert all(sink[-1] == Progress("load", 10, 10) for sink in seen)

    asyncio.run(main())


def test_a_load_that_nobody_waits_for_any_more_is_given_up_and_begins_anew_for_the_next() -> None:
    async def main() -> None:
        backend = FakeBackend()
        backend.gate.clear()
        async with pool(backend) as running:
            waiters = [asyncio.ensure_future(use(running, "a")) for _ in range(2)]
            await asyncio.to_thread(backend.started.wait, 5)
            waiters[0].cancel()
            await asyncio.wait([waiters[0]])
            assert states(running) == {"a": "LOADING"}
            waiters[1].cancel()
            await asyncio.wait([waiters[1]])
            again = asyncio.ensure_future(use(running, "a"))
            while len(backend.loads) < 2:
                await asyncio.sleep(0.01)
            backend.gate.set()
            assert await again == "a"
        assert backend.loads == ["a", "a"]

    asyncio.run(main())


def test_a_failed_load_is_told_to_everyone_listed_and_tried_again() -> None:
    async def main() -> None:
        backend = FakeBackend()

        def fail(name: str) -> None:
            raise ModelLoadFailed(name, "made to fail", "mend it")

        backend.before = fail
        async with pool(backend) as running:
            ends = await asyncio.gather(*(use(running, "a") for _ in range(3)), return_exceptions=True)
            assert [type(end) for end in ends] == [ModelLoadFailed] * 3
            (listed,) = [entry for entry in await running.entries() if entry.name == "a"]
            assert listed.state == "FAILED"
            assert "made to fail" in (listed.error or "")
            backend.before = lambda name: None
            assert await use(running, "a") == "a"

    asyncio.run(main())


def test_an_unexpected_exception_in_a_load_is_a_load_failure_without_its_text() -> None:
    async def main() -> None:
        backend = FakeBackend()

        def fail(name: str) -> None:
            raise KeyError("/secret/path")

        backend.before = fail
        async with pool(backend) as running:
            with pytest.raises(ModelLoadFailed, match="KeyError") as caught:
                await use(running, "a")
            assert "secret" not in str(caught.value)

    asyncio.run(main())


def test_unloading_waits_for_live_requests_and_new_ones_get_a_fresh_engine() -> None:
    async def main() -> None:
        backend = FakeBackend()
        async with pool(backend) as running:
            async with running.lease("a", autoload=True, progress=quiet):
                unloading = asyncio.ensure_future(running.unload("a", now=False))
                await asyncio.sleep(0)
                late = asyncio.ensure_future(use(running, "a"))
                done, _ = await asyncio.wait([unloading, late], timeout=0.05)
                assert not done
                assert states(running) == {"a": "DRAINING"}
            assert (await unloading).freed_bytes == 1000
            assert await late == "a"
        assert backend.loads == ["a", "a"]

    asyncio.run(main())


def test_unloading_now_does_not_wait() -> None:
    async def main() -> None:
        backend = FakeBackend()
        async with pool(backend) as running, running.lease("a", autoload=True, progress=quiet):
            gone = await running.unload("a", now=True)
            assert gone.entry.state == "ABSENT"
            assert backend.engines[0].closes == ["unloaded"]

    asyncio.run(main())


def test_now_overtakes_an_unload_that_still_waits() -> None:
    async def main() -> None:
        backend = FakeBackend()
        async with pool(backend) as running, running.lease("a", autoload=True, progress=quiet):
            patient = asyncio.ensure_future(running.unload("a", now=False))
            await asyncio.sleep(0)
            await running.unload("a", now=True)
            assert (await patient).entry.state == "ABSENT"

    asyncio.run(main())


def test_an_unload_whose_caller_leaves_keeps_the_model() -> None:
    async def main() -> None:
        backend = FakeBackend()
        async with pool(backend) as running, running.lease("a", autoload=True, progress=quiet):
            unloading = asyncio.ensure_future(running.unload("a", now=False))
            await asyncio.sleep(0)
            unloading.cancel()
            await asyncio.wait([unloading])
            assert states(running) == {"a": "BUSY"}
            assert await use(running, "a") == "a"

    asyncio.run(main())


def test_unloading_what_is_not_loaded_frees_nothing() -> None:
    async def main() -> None:
        async with pool(FakeBackend()) as running:
            gone = await running.unload("b", now=False)
            assert (gone.entry.name, gone.entry.state, gone.freed_bytes) == ("b", "ABSENT", 0)
            with pytest.raises(ModelNotFound):
                await running.unload("zz", now=False)

    asyncio.run(main())


def test_an_engine_that_ends_by_itself_is_failed_and_loaded_anew_by_the_next_request() -> None:
    async def main() -> None:
        backend = FakeBackend()
        async with pool(backend) as running:
            await use(running, "a")
            backend.engines[0].end("three steps in a row failed")
            await asyncio.sleep(0)
            assert [(e.state, e.error) for e in running.loaded()] == [("FAILED", "three steps in a row failed")]
            assert await use(running, "a") == "a"
        assert backend.loads == ["a", "a"]

    asyncio.run(main())


def test_without_autoload_only_loaded_models_serve() -> None:
    async def main() -> None:
        async with pool(FakeBackend()) as running:
            with pytest.raises(ModelNotFound, match="not loaded"):
                await use(running, "a", autoload=False)
            await running.load("a", LoadOptions(), quiet)
            assert await use(running, "a", autoload=False) == "a"

    asyncio.run(main())


def test_a_new_policy_holds_for_models_that_were_given_no_time_of_their_own() -> None:
    async def main() -> None:
        async with pool(FakeBackend(), ttl_s=3600) as running:
            await running.load("a", LoadOptions(), quiet)
            await running.load("b", LoadOptions(ttl_s=7200), quiet)
            running.set_policy(autoload=False, ttl_s=0.05)
            while "a" in states(running):
                await asyncio.sleep(0.01)
            assert states(running) == {"b": "READY"}
            with pytest.raises(ModelNotFound, match="not loaded"):
                await use(running, "c")

    asyncio.run(main())


def test_a_longer_ttl_holds_before_the_shorter_one_has_passed() -> None:
    async def main() -> None:
        async with pool(FakeBackend(), ttl_s=0.05) as running:
            await running.load("a", LoadOptions(), quiet)
            await running.load("b", LoadOptions(ttl_s=0.1), quiet)
            running.set_policy(autoload=True, ttl_s=3600)
            while "b" in states(running):
                await asyncio.sleep(0.01)
            assert states(running) == {"a": "READY"}

    asyncio.run(main())


def test_an_idle_model_goes_after_its_ttl_and_a_pinned_or_used_one_stays() -> None:
    async def main() -> None:
        backend = FakeBackend()
        async with pool(backend, ttl_s=0.05) as running:
            await running.load("b", LoadOptions(pin=True), quiet)
            async with running.lease("a", autoload=True, progress=quiet):
                await use(running, "c")
                while "c" in states(running):
                    await asyncio.sleep(0.01)
                assert states(running) == {"a": "BUSY", "b": "READY"}
            while "a" in states(running):
                await asyncio.sleep(0.01)
            assert states(running) == {"b": "READY"}

    asyncio.run(main())


def test_unloading_a_model_that_loads_ends_the_load_and_those_who_wait() -> None:
    async def main() -> None:
        backend = FakeBackend()
        backend.gate.clear()
        async with pool(backend) as running:
            waiter = asyncio.ensure_future(use(running, "a"))
            await asyncio.to_thread(backend.started.wait, 5)
            assert (await running.unload("a", now=False)).entry.state == "ABSENT"
            with pytest.raises(Cancelled, match="model unloaded"):
                await waiter
            assert states(running) == {}

    asyncio.run(main())


def test_closing_ends_engines_loads_and_those_who_wait() -> None:
    async def main() -> None:
        backend = FakeBackend()
        async with pool(backend) as running:
            await use(running, "a")
            backend.gate.clear()
            waiter = asyncio.ensure_future(use(running, "b"))
            while "b" not in backend.loads:
                await asyncio.sleep(0.01)
            await running.close()
            with pytest.raises(ShuttingDown):
                await waiter
            with pytest.raises(ShuttingDown):
                await use(running, "a")
        assert backend.engines[0].closes == ["shutdown"]

    asyncio.run(main())


class Stuck:
    """A gate that nothing but `let` opens: its load reports nothing, as on a drive that does not answer."""

    def __init__(self, backend: FakeBackend, name: str) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        backend.before = lambda loading: self._wait() if loading == name else None

    def _wait(self) -> None:
        self.reached.set()
        self._open.wait(30)

    def let(self) -> None:
        self._open.set()


def test_a_load_that_says_nothing_any_more_is_given_up_and_others_load_meanwhile() -> None:
    async def main() -> None:
        backend, guard = FakeBackend(), MemoryGuard()
        stuck = Stuck(backend, "a")
        async with pool(backend, guard=guard, deadlines=Deadlines(stalled_s=0.2)) as running:
            with pytest.raises(ModelLoadFailed, match=r"nothing was heard from the load for 0\.2 s"):
                await running.load("a", LoadOptions(), quiet)
            assert states(running) == {"a": "FAILED"}
            assert await use(running, "b") == "b"
            running.forget_returned()
            assert guard.ledger.held(["unreturned"]) > 0  # what it has read is still there
            stuck.let()
            while guard.ledger.held(["unreturned"]):
                await asyncio.sleep(0.01)
                running.forget_returned()
            assert await use(running, "a") == "a"

    asyncio.run(main())


def test_a_model_that_somebody_waits_for_does_not_expire() -> None:
    """PL-07: who has waited for the load is about to use it when the idle time is over."""

    async def main() -> None:
        backend = FakeBackend()
        async with pool(backend, ttl_s=0.05) as running:
            async with running.lease("a", autoload=True, progress=quiet):
                await asyncio.sleep(0.1)  # longer than the idle time, in use
                assert states(running) == {"a": "BUSY"}
            assert states(running) == {"a": "READY"}
            while states(running):
                await asyncio.sleep(0.01)
        assert backend.loads == ["a"]

    asyncio.run(main())


def test_every_change_of_a_models_state_is_told() -> None:
    told: list[tuple[str, str, str | None]] = []

    async def main() -> None:
        backend = FakeBackend()
        options = {"on_state": lambda entry: told.append((entry.name, entry.state, entry.error))}
        async with pool(backend, **options) as running:
            await use(running, "a")
            backend.engines[0].end("it broke")
            await asyncio.sleep(0)
            await use(running, "a")
            await running.unload("a", now=True)

    asyncio.run(main())
    first = ["LOADING", "READY", "BUSY", "READY", "FAILED"]
    assert told == [
        *(("a", state, "it broke" if state == "FAILED" else None) for state in first),
        *(("a", state, None) for state in ["LOADING", "READY", "BUSY", "READY", "UNLOADING", "ABSENT"]),
    ]


def test_a_models_numbers_outlive_its_engines() -> None:
    async def main() -> list[int]:
        backend = FakeBackend()
        seen = []
        async with pool(backend) as running:
            for _ in range(3):
                await use(running, "a")
                backend.engines[-1].meter.stepped(5)
                seen.append(running.metrics()["a"].counters["generated_tokens"])
                await running.unload("a", now=True)
                seen.append(running.metrics()["a"].counters["generated_tokens"])
            assert running.metrics()["a"].histograms["batch_size"].count == 3
        return seen

    assert asyncio.run(main()) == [5, 5, 10, 10, 15, 15]


def test_a_model_that_keeps_no_prompts_says_so() -> None:
    async def main() -> str | None:
        backend = FakeBackend()
        async with pool(backend) as running:
            await use(running, "a")
            assert running.loaded()[0].note is None
            backend.engines[0].uncached = "no layout for FooCache"
            return running.loaded()[0].note

    assert asyncio.run(main()) == "prompts are not kept: no layout for FooCache"
