"""Wiring: the parts of one daemon made from its settings, put together, and told of settings that are read again.

`build_service` is called once, on the event loop, when the socket is there already.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, cast

from omlxd.daemon import logs
from omlxd.daemon.events import EventHub
from omlxd.daemon.footprint import platform_probe
from omlxd.daemon.memory import Memory
from omlxd.daemon.paths import Paths
from omlxd.daemon.reload import LiveSettings
from omlxd.daemon.service import OnShutdown, Service
from omlxd.daemon.settings import Settings
from omlxd.engine.backend import CacheOptions, MlxBackend
from omlxd.engine.catalog import Catalog, Root
from omlxd.engine.disk_cache import DiskOptions
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.image_policy import ImagePolicy
from omlxd.engine.limits import MemoryPolicy
from omlxd.engine.pool import Pool
from omlxd.engine.scheduler import SchedulerLimits


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
