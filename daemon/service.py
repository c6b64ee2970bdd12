"""The service: what `rpc/` asks of the daemon, done by the pool, the generations under way and the pull.

Lives on the event loop and blocks nothing: the catalog is read on a worker thread, models load on the loader thread,
a pull has a thread of its own. `daemon/wiring.py` puts a daemon's parts together.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import logging
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

from omlxd import __version__
from omlxd.daemon import reload
from omlxd.daemon.caches import Caches, CacheShelf, explain
from omlxd.daemon.events import EventHub
from omlxd.daemon.generations import Generations
from omlxd.daemon.memory import Memory
from omlxd.daemon.paths import Paths
from omlxd.daemon.pulls import Pulls
from omlxd.daemon.reload import LiveSettings
from omlxd.daemon.sessions import Sessions
from omlxd.daemon.settings import ConfigError
from omlxd.engine.api import (
    CacheExplanation,
    CacheLine,
    CacheNode,
    CacheTier,
    CacheVerified,
    DaemonInfo,
    DaemonMetrics,
    DaemonStatus,
    GenerateRequest,
    Generation,
    LoadOptions,
    MemoryStatus,
    ModelBusy,
    ModelEntry,
    Progress,
    ProgressSink,
    Prompt,
    Reloaded,
    SessionEntry,
    ShuttingDown,
    StorageFailed,
    Subscription,
    TokenPrompt,
    Topic,
    Unloaded,
)
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.pool import Pool
from omlxd.engine.pull import pull
from omlxd.engine.removal import remove_pulled
from omlxd.engine.slot import EngineHandle

OnShutdown = Callable[[float | None], None]
T = TypeVar("T")

_ON_THE_WAY = {"LOADING", "DRAINING", "UNLOADING"}
_log = logging.getLogger(__name__)


class Service:
    """Implements `engine.api.Backend`."""

    def __init__(
        self,
        pool: Pool,
        shelf: CacheShelf,
        events: EventHub,
        *,
        paths: Paths,
        live: LiveSettings,
        on_shutdown: OnShutdown,
        memory: Memory,
        guard: MemoryGuard,
    ) -> None:
        """`pool` tells `events` of its models."""
        self._memory = memory
        self._pool = pool
        self._events = events
        self._caches = Caches(shelf, pool, events)
        self._paths = paths
        self._live = live
        self._on_shutdown = on_shutdown
        self._sessions = Sessions(shelf.disk, pool, guard)
        self._generations = Generations(pool, events, self._sessions)
        self._pulls = Pulls(pull, Path(paths.models_dir))
        self._began = time.monotonic()
        self._closing = False
        self._waiting: set[asyncio.Future[Any]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Reads the packages' versions, off the loop: the first `daemon.info` should not wait for it."""
        self._memory.start()
        await asyncio.to_thread(_versions)

    async def close(self, disk_s: float) -> None:
        """Ends what still runs with ShuttingDown, and every thread, the cache's last: it has `disk_s` for its files."""
        self._closing = self._is_closed = True
        self._generations.end_all()
        for work in self._waiting:
            work.cancel()
        await asyncio.gather(self._pulls.close(), self._pool.close())
        await asyncio.to_thread(self._memory.close)
        await self._sessions.close()
        await self._caches.close(disk_s)

    @property
    def is_busy(self) -> bool:
        """Whether a request is live or a model is on its way in or out."""
        return bool(self._generations.infos()) or any(model.state in _ON_THE_WAY for model in self._pool.loaded())

    # -- the daemon ---------------------------------------------------------------------------------------------------

    def info(self) -> DaemonInfo:
        versions = _versions()
        return DaemonInfo(
            version=__version__,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._began,
            home=self._paths.home,
            socket=self._paths.socket,
            device="gpu" if sys.platform == "darwin" else "cpu",
            platform=platform.platform(),
            mlx=versions["mlx"],
            mlx_lm=versions["mlx-lm"],
            mlx_vlm=versions["mlx-vlm"],
        )

    def status(self) -> DaemonStatus:
        requests = self._generations.infos()
        return DaemonStatus(
            info=self.info(),
            models=self._pool.loaded(),
            requests=requests,
            counts={"live": len(requests), **self._generations.counts},
            memory=asdict(self._memory.status()),
            cache=self._caches.summary(),
        )

    def metrics(self) -> DaemonMetrics:
        return DaemonMetrics(
            gauges={
                "uptime_s": time.monotonic() - self._began,
                "live_requests": len(self._generations.infos()),
                "loaded_models": sum(model.loaded_at is not None for model in self._pool.loaded()),
                "footprint_bytes": self._memory.footprint_bytes,
                "cache_hot_bytes": self._caches.hot_bytes,
                "cache_ssd_bytes": self._caches.ssd_bytes,
            },
            requests=dict(self._generations.counts),
            models=self._pool.metrics(),
        )

    def subscribe(self, topics: Collection[Topic]) -> Subscription:
        return self._events.subscribe(topics)

    def request_shutdown(self, grace_s: float | None) -> None:
        """From now on new work is refused; what runs has its grace."""
        self._closing = True
        self._generations.refuse_new()
        self._on_shutdown(grace_s)

    async def reload(self) -> Reloaded:
        try:
            new = await asyncio.to_thread(self._live.read)
        except ConfigError as error:
            path = self._paths.config
            raise StorageFailed(path, str(error).removeprefix(f"{path}: ")) from error
        reloaded = self._live.apply(new)
        _log.info("settings read again; %s", reload.described(reloaded))
        return reloaded

    # -- models -------------------------------------------------------------------------------------------------------

    async def list_models(self) -> Sequence[ModelEntry]:
        return await self._pool.entries()

    async def load_model(self, model: str, options: LoadOptions, progress: ProgressSink) -> ModelEntry:
        self._check_open()
        return await self._pool.load(model, options, progress)

    async def unload_model(self, model: str, *, now: bool) -> Unloaded:
        return await self._unless_closed(self._pool.unload(model, now=now))

    async def pin_model(self, model: str, *, pinned: bool) -> ModelEntry:
        return await self._pool.pin(model, pinned=pinned)

    async def remove_model(self, model: str) -> int:
        entry = await self._pool.entry(model)
        if entry.state not in ("ABSENT", "FAILED"):
            raise ModelBusy(entry.name, entry.requests)
        freed = await asyncio.to_thread(remove_pulled, Path(entry.path), Path(self._paths.models_dir))
        self._events.publish("models", model=entry.name, state="ABSENT", what="removed")
        return freed

    def memory_status(self) -> MemoryStatus:
        return self._memory.status()

    def set_memory(
        self, tier: Literal["safe", "balanced", "aggressive"] | None, limit_bytes: int | None
    ) -> MemoryStatus:
        return self._memory.set(tier, limit_bytes)

    async def pull_model(self, source: str, name: str | None, progress: ProgressSink) -> ModelEntry:
        """Gets a model into the home. Cancelled, it leaves nothing half done."""
        self._check_open()
        path = await self._pulls.run(source, name, progress)
        return await self._pool.entry(str(path))

    # -- generating ---------------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> Generation:
        return self._generations.start(request)

    async def tokenize(self, model: str, prompt: Prompt) -> Sequence[int]:
        return await self._with_engine(model, lambda engine: engine.token_ids(prompt))

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        return await self._with_engine(model, lambda engine: engine.text(token_ids))

    # -- the cache ----------------------------------------------------------------------------------------------------

    async def cache_stats(self, model: str | None) -> Sequence[CacheLine]:
        return await self._caches.stats(model)

    async def explain_cache(self, model: str, prompt: Prompt) -> CacheExplanation:
        return await self._with_engine(model, lambda engine: explain(engine, prompt))

    async def clear_cache(self, model: str | None, tier: CacheTier) -> int:
        return await self._caches.clear(model, tier)

    async def inspect_cache(self, model: str, limit: int, session: str | None) -> Sequence[CacheNode]:
        return await self._with_engine(model, lambda engine: self._sessions.inspect(engine, limit, session))

    async def verify_cache(self, model: str | None) -> CacheVerified:
        found = await self._caches.verify(model)
        return CacheVerified(found.checked, found.bad, found.repaired)

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def save_session(
        self, model: str, name: str, prompt: Prompt, *, replace: bool, progress: ProgressSink
    ) -> SessionEntry:
        self._sessions.check_name(name)
        generation = self.generate(GenerateRequest(model=model, prompt=prompt, progress=True, warm=True))
        warmed = await self._sessions.warmed(generation, progress)
        return await self._with_engine(
            model, lambda engine: self._sessions.save_prompt(engine, name, warmed, may_replace=replace)
        )

    async def list_sessions(self, model: str | None) -> Sequence[SessionEntry]:
        return await self._sessions.list(model)

    async def delete_session(self, model: str, name: str) -> SessionEntry:
        return await self._sessions.delete(model, name)

    async def export_session(self, model: str, name: str, path: str) -> SessionEntry:
        return await self._with_engine(model, lambda engine: self._sessions.export(engine, name, path))

    async def import_session(self, model: str, name: str, path: str) -> SessionEntry:
        async with self._sessions.imported(name, path) as content:
            first = TokenPrompt(content.sample)
            generation = self.generate(GenerateRequest(model=model, prompt=first, warm=True, cache=True))
            await self._sessions.warmed(generation, _quiet)
            return await self._with_engine(model, lambda engine: self._sessions.take_in(engine, name, content))

    # -- small things -------------------------------------------------------------------------------------------------

    async def _with_engine(self, model: str, use: Callable[[EngineHandle], Awaitable[T]]) -> T:
        self._check_open()

        async def work() -> T:
            async with self._pool.lease(model, autoload=True, progress=_quiet) as engine:
                return await use(engine)

        return await self._unless_closed(work())

    async def _unless_closed(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives, or ShuttingDown when the service closes before that: every client gets an answer."""
        task = asyncio.ensure_future(work)
        self._waiting.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_closed:
                raise ShuttingDown from None
            raise
        finally:
            self._waiting.discard(task)

    def _check_open(self) -> None:
        if self._closing:
            raise ShuttingDown


@functools.cache
def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm", "mlx-vlm")}


def _quiet(_: Progress) -> None:
    """For methods whose answer is quick once the model is loaded."""
