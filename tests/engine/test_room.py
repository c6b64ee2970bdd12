"""Room in the pool: loads reserve first, idle models make way, pinned ones stay, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omlxd.engine import room
from omlxd.engine.api import (
    Cancelled,
    EngineFailed,
    LoadOptions,
    MemoryExceeded,
    ModelLoadFailed,
    Progress,
    Unsupported,
)
from omlxd.engine.catalog import CatalogEntry
from omlxd.engine.deadlines import Deadlines
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.inbox import Closed
from omlxd.engine.load_bytes import fingerprint, load_bytes
from omlxd.engine.model import LoadedModel
from omlxd.engine.pool import Pool
from omlxd.engine.unreturned import remains_of
from tests.engine.test_guard import limits
from tests.engine.test_pool import FakeBackend, FakeCatalog, quiet, states, use
from tests.models import write

WEIGHTS = 1000  # of each fake model; twice that while it loads


class WeighingBackend(FakeBackend):
    """Its models weigh what the catalog says; `most` is the most that was ever reserved at a load's begin."""

    def __init__(self, guard: MemoryGuard) -> None:
        super().__init__()
        self.guard = guard
        self.most = 0
        self.log: list[str] = []

    def load(self, entry: CatalogEntry, options: LoadOptions, progress: Any) -> LoadedModel:
        self.most = max(self.most, self.guard.ledger.total())
        self.log.append(f"load {entry.name}")
        loaded = super().load(entry, options, progress)
        return replace(loaded, facts=replace(loaded.facts, weight_bytes=WEIGHTS))


class Setup:
    def __init__(self, soft: int, **options: Any) -> None:
        self.guard = MemoryGuard(limits=limits(soft))
        self.backend = WeighingBackend(self.guard)
        told = lambda entry: self.backend.log.append(f"{entry.state} {entry.name}")  # noqa: E731
        self.pool = Pool(FakeCatalog(), self.backend, guard=self.guard, on_state=told, **options)  # type: ignore[arg-type]

    @property
    def held(self) -> dict[str, int]:
        return {entry.owner: entry.bytes for entry in self.guard.ledger.entries()}


@asynccontextmanager
async def room_for(count: int, **options: Any) -> AsyncIterator[Setup]:
    """A pool with room for so many fake models, and for one more to load beside them but for one."""
    setup = Setup(WEIGHTS * (count + 1), **options)
    try:
        yield setup
    finally:
        setup.backend.gate.set()
        await asyncio.wait_for(setup.pool.close(), 10)
        setup.guard.ledger.check()
        assert setup.guard.ledger.total() == 0


def test_a_model_is_reserved_before_it_loads_and_its_bytes_come_back_with_it() -> None:
    async def main() -> None:
        async with room_for(2) as s:
            s.backend.gate.clear()
            loading = asyncio.ensure_future(s.pool.load("a", LoadOptions(), quiet))
            await asyncio.to_thread(s.backend.started.wait, 5)
            assert s.held == {"a": 2 * WEIGHTS}
            s.backend.gate.set()
            await loading
            assert s.held == {"a": WEIGHTS}
            await s.pool.unload("a", now=False)
            assert s.held == {}

    asyncio.run(main())


def test_the_first_model_has_gone_before_the_second_one_begins_to_load() -> None:
    """MM-15."""

    async def main() -> None:
        async with room_for(1) as s:
            await s.pool.load("a", LoadOptions(), quiet)
            await use(s.pool, "b")
            log = s.backend.log
            assert log.index("ABSENT a") < log.index("load b")
            assert s.backend.most <= 2 * WEIGHTS

    asyncio.run(main())


def test_the_least_recently_used_idle_model_makes_way() -> None:
    async def main() -> None:
        async with room_for(2) as s:
            await use(s.pool, "a")
            await use(s.pool, "b")
            await use(s.pool, "a")
            await use(s.pool, "c")
            assert states(s.pool) == {"a": "READY", "c": "READY"}

    asyncio.run(main())


def test_a_pinned_model_stays_and_the_refusal_names_it() -> None:
    async def main() -> None:
        async with room_for(1) as s:
            await s.pool.load("a", LoadOptions(pin=True), quiet)
            with pytest.raises(MemoryExceeded, match="unpin a") as caught:
                await use(s.pool, "b")
            assert caught.value.fields["needed_bytes"] == 2 * WEIGHTS
            assert caught.value.fields["limit_bytes"] == WEIGHTS
            assert states(s.pool) == {"a": "READY", "b": "FAILED"}
            await s.pool.pin("a", pinned=False)
            await use(s.pool, "b")
            assert states(s.pool) == {"b": "READY"}

    asyncio.run(main())


def test_loads_that_wait_in_vain_do_not_keep_each_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PATIENCE_S", 0.1)

    async def main() -> None:
        async with room_for(1) as s:
            taken = s.guard.reserve("another", "kv", WEIGHTS)
            assert taken is not None
            ends = await asyncio.wait_for(
                asyncio.gather(*(use(s.pool, name) for name in ("a", "b")), return_exceptions=True), 30
            )
            assert [type(end) for end in ends] == [MemoryExceeded, MemoryExceeded]
            taken.release()
            await use(s.pool, "a")

    asyncio.run(main())


def test_a_pinned_model_goes_when_it_is_unloaded_by_hand() -> None:
    async def main() -> None:
        async with room_for(1) as s:
            await s.pool.load("a", LoadOptions(pin=True), quiet)
            await s.pool.unload("a", now=False)
            await use(s.pool, "b")

    asyncio.run(main())


def test_a_model_that_fits_nowhere_is_refused_and_nobody_makes_way_for_it() -> None:
    async def main() -> None:
        async with room_for(2) as s:
            await use(s.pool, "a")
            s.guard.limits = limits(WEIGHTS + WEIGHTS // 2)
            with pytest.raises(MemoryExceeded, match=r"raise memory\.limit_bytes"):
                await use(s.pool, "b")
            assert states(s.pool)["a"] == "READY"

    asyncio.run(main())


def test_only_a_loaded_model_can_be_pinned() -> None:
    async def main() -> None:
        async with room_for(1) as s:
            with pytest.raises(Unsupported, match="not loaded"):
                await s.pool.pin("a", pinned=True)
            assert (await s.pool.pin("a", pinned=False)).state == "ABSENT"
            await use(s.pool, "a")
            assert (await s.pool.pin("a", pinned=True)).pinned
            assert s.guard.pinned == {"a"}

    asyncio.run(main())


def test_a_busy_model_finishes_what_it_has_before_it_makes_way() -> None:
    async def main() -> None:
        async with room_for(1) as s:
            seen: list[Progress] = []
            async with s.pool.lease("a", autoload=True, progress=quiet):
                other = asyncio.ensure_future(use(s.pool, "b", progress=seen.append))
                while not seen:
                    await asyncio.sleep(0.01)
                assert (seen[0].phase, seen[0].detail) == ("held", "waits for memory")
                assert states(s.pool) == {"a": "DRAINING", "b": "LOADING"}
            assert await asyncio.wait_for(other, 10) == "b"
            assert states(s.pool) == {"b": "READY"}

    asyncio.run(main())


def test_two_models_that_fit_only_one_at_a_time_both_serve_everyone() -> None:
    """PL-05: 10 requests of each, interleaved, by 4 clients."""

    async def main() -> None:
        async with room_for(1) as s:
            work = iter(["a", "b"] * 10)

            async def client() -> list[str]:
                return [await use(s.pool, name) for name in work]

            answers = await asyncio.wait_for(asyncio.gather(*(client() for _ in range(4))), 60)
            assert sorted(itertools.chain(*answers)) == ["a"] * 10 + ["b"] * 10
            assert len(s.backend.loads) <= 20
            assert s.backend.most <= 2 * WEIGHTS

    asyncio.run(main())


def test_a_model_that_was_waited_for_is_used_before_it_may_leave_again() -> None:
    async def main() -> None:
        async with room_for(1) as s:
            answers = await asyncio.wait_for(asyncio.gather(use(s.pool, "a"), use(s.pool, "b"), use(s.pool, "c")), 60)
            assert answers == ["a", "b", "c"]
            assert sorted(s.backend.loads) == ["a", "b", "c"]

    asyncio.run(main())


def test_who_stops_waiting_for_room_leaves_nothing_reserved() -> None:
    async def main() -> None:
        async with room_for(1) as s, s.pool.lease("a", autoload=True, progress=quiet):
            other = asyncio.ensure_future(use(s.pool, "b"))
            while states(s.pool).get("a") != "DRAINING":
                await asyncio.sleep(0.01)
            other.cancel()
            while "b" in states(s.pool):
                await asyncio.sleep(0.01)
            assert s.held == {"a": WEIGHTS}

    asyncio.run(main())


def test_a_failed_load_leaves_nothing_behind_and_can_be_tried_again() -> None:
    async def main() -> None:
        async with room_for(1) as s:

            def fail(name: str) -> None:
                raise ModelLoadFailed(name, "made to fail", "mend it")

            s.backend.before = fail
            with pytest.raises(ModelLoadFailed):
                await use(s.pool, "a")
            assert s.held == {}
            s.backend.before = lambda name: None
            await use(s.pool, "a")
            assert s.held == {"a": WEIGHTS}

    asyncio.run(main())


def test_the_ladder_takes_idle_models_least_recently_used_first_and_no_others() -> None:
    async def main() -> None:
        async with room_for(3) as s:
            for name in "abc":
                await use(s.pool, name)
            await s.pool.pin("a", pinned=True)
            async with s.pool.lease("b", autoload=True, progress=quiet):
                assert s.pool.unload_idle() == ("c", WEIGHTS)  # a is pinned, b is used
                assert s.pool.unload_idle() is None
            while "c" in states(s.pool):
                await asyncio.sleep(0.01)
            assert states(s.pool) == {"a": "READY", "b": "READY"}

    asyncio.run(main())


def test_unloading_and_asking_at_once_never_makes_two_engines() -> None:
    """PL-01."""

    async def main() -> None:
        async with room_for(1) as s:
            chance = random.Random(0)
            for _ in range(50):
                asking = asyncio.ensure_future(use(s.pool, "a"))
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                await s.pool.unload("a", now=False)
                with suppress(Cancelled):  # it was unloaded while it was loading: asked again, it comes
                    assert await asking == "a"
                live = [engine for engine in s.backend.engines if not engine.closed.done()]
                assert len(live) <= 1
                assert s.guard.ledger.total() == WEIGHTS * len(live)

    asyncio.run(main())


# -- what is left behind ----------------------------------------------------------------------------------------------


class Model:
    """Stands for a module that somebody keeps."""


def test_a_model_that_is_still_held_is_named_in_the_ledger_until_it_goes() -> None:
    async def main() -> None:
        async with room_for(1) as s:
            await use(s.pool, "a")
            model = Model()
            keeper = {"kept": model}
            remains = remains_of(weakref.ref(model))
            del model
            assert remains is not None
            assert "dict" in remains.holder
            s.backend.engines[0].close = lambda command: s.backend.engines[0].closed.set_result(  # type: ignore[method-assign]
                Closed(None, 0, remains)
            )
            await s.pool.unload("a", now=False)
            assert s.held == {f"a, held by {remains.holder}": WEIGHTS}
            s.pool.forget_returned()
            assert len(s.held) == 1
            keeper.clear()
            gc.collect()
            s.pool.forget_returned()
            assert s.held == {}

    asyncio.run(main())


def test_an_engine_that_does_not_end_is_given_up_and_the_model_may_be_loaded_anew() -> None:
    async def main() -> None:
        async with room_for(3, deadlines=Deadlines(let_go_s=0.1)) as s:
            running = s.pool
            await use(running, "a")
            hanging = s.backend.engines[0]
            hanging.close = lambda command: None  # type: ignore[method-assign]
            with pytest.raises(EngineFailed, match=r"did not end within 0\.1 s"):
                await running.unload("a", now=True)
            while states(running) != {"a": "FAILED"}:
                await asyncio.sleep(0.01)
            assert s.held == {"a, held by its engine, which does not end": WEIGHTS}
            assert await use(running, "a") == "a"
            hanging.end(None)
            await asyncio.sleep(0)
            assert s.held == {"a": WEIGHTS}
            assert states(running) == {"a": "READY"}

    asyncio.run(main())


# -- what is on disk --------------------------------------------------------------------------------------------------


def test_the_weights_are_weighed_by_their_headers(tmp_path: Path) -> None:
    path = write("llama", tmp_path / "m")
    on_disk = (path / "model.safetensors").stat().st_size
    entry = CatalogEntry("m", path, "text", on_disk)
    exact = load_bytes(entry, widens_halves=True)  # fp32 already
    assert on_disk - 8192 < exact < on_disk
    (path / "model.safetensors").write_bytes(b"not weights")
    assert load_bytes(entry, widens_halves=True) == on_disk


def test_half_precision_takes_twice_its_size_where_it_is_cast(tmp_path: Path) -> None:
    import mlx.core as mx

    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"w": mx.zeros((10, 10), dtype=mx.bfloat16)})
    entry = CatalogEntry("m", tmp_path, "text", 1)
    assert load_bytes(entry, widens_halves=False) == 200
    assert load_bytes(entry, widens_halves=True) == 400


def test_a_model_that_is_replaced_or_removed_on_disk_is_noticed_and_stays(tmp_path: Path) -> None:
    path = write("llama", tmp_path / "a")

    class OnDisk(FakeCatalog):
        def entry(self, name: str) -> CatalogEntry:
            return CatalogEntry(name, path, "text", 1000)

        def scan(self) -> tuple[CatalogEntry, ...]:
            return () if not path.exists() else (self.entry("a"),)

    async def main() -> None:
        backend = FakeBackend()
        pool = Pool(OnDisk(), backend)  # type: ignore[arg-type]

        async def note() -> str | None:
            (listed,) = await pool.entries()
            return listed.note

        await use(pool, "a")
        assert await note() is None
        (path / "config.json").write_text("{}")
        assert "files have changed" in (await note() or "")
        assert await use(pool, "a") == "a"
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
        assert "files are gone" in (await note() or "")
        assert await use(pool, "a") == "a"
        assert backend.loads == ["a"]
        assert fingerprint(path) == ()
        await pool.close()

    asyncio.run(main())
