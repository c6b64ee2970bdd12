"""A pool of real engines: what models leave behind when they go, whatever else is running or in the way."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import mlx.core as mx

from omlxd.cache.disk import Disk
from omlxd.cache.ssd import SsdStore
from omlxd.engine.api import LoadOptions
from omlxd.engine.backend import CacheOptions, MlxBackend
from omlxd.engine.catalog import Catalog, Root
from omlxd.engine.disk_cache import DiskCache
from omlxd.engine.engine import Engine
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.pool import Pool
from omlxd.engine.scheduler import SchedulerLimits
from tests.cache.shelves import open_store
from tests.engine.running import Running, assert_is_the_cold_run, job
from tests.engine.test_pool import quiet
from tests.models import build, write

FAT = {"intermediate_size": 16_384}  # two layers of three matrices of 64 x 16384: 25 MB
WEIGHTS = 2 * 3 * 64 * 16_384 * 4
MB = 2**20
PROMPT = list(range(1, 200))


class Setup:
    """Models a and b of 25 MB, in a pool of real engines."""

    def __init__(self, folder: Path) -> None:
        for seed, name in enumerate("ab"):
            write("llama", folder / name, seed=seed, eos=[], **FAT)
        self.guard = MemoryGuard()
        cache = CacheOptions(enabled=True, block_size=16, hot_bytes=64 * MB)
        self.backend = MlxBackend(SchedulerLimits(), cache, self.guard)
        self.pool = Pool(Catalog([Root(folder)]), self.backend, guard=self.guard)

    async def ask(self, name: str, prompt: Sequence[int] = PROMPT) -> None:
        async with self.pool.lease(name, autoload=True, progress=quiet) as engine:
            assert isinstance(engine, Engine)
            await Running(engine, job(prompt, 4)).result()

    def held(self) -> dict[tuple[str, str], int]:
        """By owner and kind, without the process's own."""
        entries = self.guard.ledger.entries()
        return {(entry.owner, entry.kind): entry.bytes for entry in entries if entry.kind != "process"}

    def loaded(self) -> set[str]:
        """Who has weights in the ledger."""
        return {owner for owner, kind in self.held() if kind == "weights"}


@asynccontextmanager
async def models(folder: Path) -> AsyncIterator[Setup]:
    setup = Setup(folder)
    try:
        yield setup
    finally:
        await setup.pool.close()


def allocated() -> int:
    """By MLX, for arrays and for reuse."""
    gc.collect()
    return int(mx.get_active_memory() + mx.get_cache_memory())


def test_rounds_of_loads_leave_no_array_behind(tmp_path: Path) -> None:
    """MM-11."""

    async def main() -> None:
        async with models(tmp_path) as s:
            await s.ask("a")
            await s.pool.unload("a", now=False)
            s.backend.clear_caches(None)
            start = allocated()
            for name in "ab" * 3:
                await s.ask(name)
                assert allocated() >= start + WEIGHTS
                await s.pool.unload(name, now=False)
                s.backend.clear_caches(None)
                assert allocated() <= start + 2 * MB
                assert s.held() == {}

    asyncio.run(main())


def test_what_an_unload_frees_is_the_models_own_while_another_decodes(tmp_path: Path) -> None:
    """MM-13: b allocates all the while."""

    async def main() -> None:
        async with models(tmp_path) as s:
            await s.ask("a")
            async with s.pool.lease("b", autoload=True, progress=quiet) as engine:
                assert isinstance(engine, Engine)
                answer = Running(engine, job(PROMPT, 400, stream=True))
                await answer.first_token()
                freed = (await s.pool.unload("a", now=False)).freed_bytes
                assert WEIGHTS <= freed <= WEIGHTS + MB
                assert s.loaded() == {"b"}
                assert_is_the_cold_run(build("llama", 1, **FAT), await answer.result())

    asyncio.run(main())


class Slow(Disk):
    """Writes nothing until `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def fill(self, fd, parts):  # type: ignore[no-untyped-def]
        assert self.go.wait(60)
        super().fill(fd, parts)


class OnSlowDisk(DiskCache):
    """The tier on a disk that hangs."""

    def __init__(self, home: Path, disk: Slow) -> None:
        super().__init__(None)
        self._store = open_store(home, disk=disk)

    def open(self) -> SsdStore | None:
        return self._store


def test_what_waits_to_be_written_holds_neither_the_model_nor_its_memory_for_ever(tmp_path: Path) -> None:
    """MM-12: the writer hangs; the model goes at once, what waits is named, and goes when it has been written."""

    async def main() -> None:
        disk = Slow()
        async with models(tmp_path / "models") as s:
            s.backend.disk = OnSlowDisk(tmp_path / "home", disk)
            s.guard.ledger.watch("prefixes on their way to disk", "writing", lambda: s.backend.queued_bytes)
            await s.ask("a")
            await s.pool.unload("a", now=False)
            s.backend.clear_caches(None)
            assert {kind for _, kind in s.held()} == {"writing"}
            disk.go.set()
            while s.held():
                await asyncio.sleep(0.01)
            store = s.backend.disk.open()
            assert store is not None
            store.close(30)

    asyncio.run(main())


def test_loading_and_going_while_asked_for_never_makes_two_engines(tmp_path: Path) -> None:
    """PL-01: whoever asks while the model goes gets a fresh engine, and the books are those of what is there."""

    async def main() -> None:
        async with models(tmp_path) as s:
            for _ in range(5):
                await s.ask("a")
                await asyncio.gather(s.pool.unload("a", now=False), *(s.ask("a", [n, *PROMPT]) for n in range(3)))
                assert [entry.state for entry in s.pool.loaded()] == ["READY"]
                assert s.loaded() == {"a"}
            await s.pool.load("b", LoadOptions(), quiet)
            assert s.loaded() == {"a", "b"}

    asyncio.run(main())
