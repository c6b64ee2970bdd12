"""The service: what `rpc/` asks of the daemon, done by the pool, the generations under way and the pull.

Lives on the event loop and blocks nothing: the catalog is read on a worker thread, models load on the loader thread,
a pull has a thread of its own. `build_service` is where a daemon's parts are put together.
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
from typing import Any, Literal, TypeVar, cast

from omlxd import __version__
from omlxd.daemon import logs, reload
from omlxd.daemon.caches import Caches, CacheShelf, explain
from omlxd.daemon.events import EventHub
from omlxd.daemon.footprint import platform_probe
from omlxd.daemon.generations import Generations
from omlxd.daemon.memory import Memory
from omlxd.daemon.paths import Paths
from omlxd.daemon.pulls import Pulls
from omlxd.daemon.reload import LiveSettings
from omlxd.daemon.sessions import Sessions
from omlxd.daemon.settings import ConfigError, Settings
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
from omlxd.engine.backend import CacheOptions, MlxBackend
from omlxd.engine.catalog import Catalog, Root
from omlxd.engine.disk_cache import DiskOptions
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.image_policy import ImagePolicy
from omlxd.engine.limits import MemoryPolicy
from omlxd.engine.pool import Pool
from omlxd.engine.pull import pull
from omlxd.engine.removal import remove_pulled
from omlxd.engine.scheduler import SchedulerLimits
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


def build_service(live: LiveSettings, paths: Paths, on_shutdown: OnShutdown) -> Service:
    """The parts of one daemon, put together."""
    settings = live.started
    catalog = Catalog(_roots(settings, paths), allow_remote_code=settings.models.allow_remote_code)
    engine = settings.engine
    limits = SchedulerLimits(
        max_batch=engine.max_batch,
        max_queue=engine.max_queue,
        prefill_chunk=engine.prefill_chunk,
        max_decode_stall_ms=engine.max_decode_stall_ms,
        max_chunk_ms=engine.max_chunk_ms,
    )
    cache = CacheOptions(
        enabled=settings.cache.enabled,
        block_size=settings.cache.block_size,
        hot_bytes=settings.cache.hot.max_bytes or 0,  # the enforcer's first poll gives a share of the limit
        disk=_disk(settings, paths),
    )
    events = EventHub()
    guard = MemoryGuard()
    backend = MlxBackend(
        limits,
        cache,
        guard,
        wired_limit_bytes=settings.memory.wired_limit_bytes,
        images=_images(settings),
        feature_bytes=settings.images.features_max_bytes,
    )
    pool = Pool(
        catalog,
        backend,
        autoload=settings.models.autoload,
        ttl_s=settings.models.ttl_s,
        on_state=lambda entry: events.publish("models", model=entry.name, state=entry.state, error=entry.error),
        guard=guard,
        widens_halves=sys.platform != "darwin",
    )
    memory = Memory(
        pool, guard, backend, events, platform_probe(), _policy(settings), hot_bytes=settings.cache.hot.max_bytes
    )
    live.taken_up_by(lambda new: memory.set_policy(_policy(new)), "memory.tier", "memory.limit_bytes")
    live.taken_up_by(
        lambda new: backend.pictures.set_policy(_images(new)),
        "images.allow_paths",
        "images.allow_urls",
        "images.max_pixels",
    )
    live.taken_up_by(lambda new: logs.set_level(new.log.level), "log.level")
    live.taken_up_by(lambda new: logs.set_content(new.log.content), "log.content")
    live.taken_up_by(
        lambda new: backend.disk.set_limits(_disk_options(new, paths)),
        *("cache.ssd.max_bytes", "cache.ssd.min_free_bytes", "sessions.max_count", "sessions.max_bytes"),
    )
    live.taken_up_by(
        lambda new: pool.set_policy(autoload=new.models.autoload, ttl_s=new.models.ttl_s),
        "models.autoload",
        "models.ttl_s",
    )
    return Service(pool, backend, events, paths=paths, live=live, on_shutdown=on_shutdown, memory=memory, guard=guard)


def _roots(settings: Settings, paths: Paths) -> list[Root]:
    from huggingface_hub.constants import HF_HUB_CACHE  # the library knows which variables move its cache

    own = Root(Path(paths.models_dir), "home")
    return [own, Root(Path(HF_HUB_CACHE), "huggingface"), *(Root(Path(dir)) for dir in settings.models.dirs)]


def _policy(settings: Settings) -> MemoryPolicy:
    memory = settings.memory
    if memory.limit_bytes is not None:
        return MemoryPolicy("custom", memory.limit_bytes)
    return MemoryPolicy(cast('Literal["safe", "balanced", "aggressive"]', memory.tier))


def _images(settings: Settings) -> ImagePolicy:
    images = settings.images
    return ImagePolicy(images.allow_paths, images.allow_urls, images.max_pixels)


def _disk(settings: Settings, paths: Paths) -> DiskOptions | None:
    return _disk_options(settings, paths) if settings.cache.ssd.enabled else None


def _disk_options(settings: Settings, paths: Paths) -> DiskOptions:
    ssd = settings.cache.ssd
    return DiskOptions(
        directory=Path(ssd.dir or paths.cache_dir),
        memo=Path(paths.cache_place),
        max_bytes=ssd.max_bytes,
        min_free_bytes=ssd.min_free_bytes,
        max_sessions=settings.sessions.max_count,
        max_session_bytes=settings.sessions.max_bytes,
    )


@functools.cache
def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm", "mlx-vlm")}


def _quiet(_: Progress) -> None:
    """For methods whose answer is quick once the model is loaded."""
