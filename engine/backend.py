"""From catalog entries to engines, for real: the pool's `ModelBackend` over mlx, and the caches of all models.

`load` is the only place that brings mlx into the process, on the loader thread; the event loop then finds it imported.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from omlxd.cache.hot import HotTier, TierStats
from omlxd.engine.allocator import Allocator, MlxAllocator, NoAllocator
from omlxd.engine.api import LoadOptions, ProgressSink
from omlxd.engine.catalog import CatalogEntry
from omlxd.engine.disk_cache import DiskCache, DiskOptions
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.hooks import Hook
from omlxd.engine.image_policy import ImagePolicy
from omlxd.engine.model import LoadedModel
from omlxd.engine.open_files import allow_mlx_lm
from omlxd.engine.pictures import Pictures
from omlxd.engine.scheduler import SchedulerLimits

if TYPE_CHECKING:
    from omlxd.cache.prefix import CacheStats
    from omlxd.cache.registry import CacheRegistry
    from omlxd.cache.ssd import ModelStore
    from omlxd.cache.ssd_format import Model
    from omlxd.engine.engine import Engine

log = logging.getLogger(__name__)

MAX_MODELS = 256  # loaded at once; each has a thread


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Whether prompts are kept, in blocks of how many tokens, and in how many bytes of memory for all models."""

    enabled: bool
    block_size: int
    hot_bytes: int
    disk: DiskOptions | None = None


class MlxBackend:
    """Loads with mlx-lm or mlx-vlm, opens each model's prefix cache and starts its engine thread."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cache: CacheOptions,
        guard: MemoryGuard | None = None,
        *,
        wired_limit_bytes: int | None = None,
        images: ImagePolicy | None = None,
        feature_bytes: int = 0,
    ) -> None:
        """`feature_bytes` may be kept of what each model has seen, and as much again of what it was given for it."""
        self._limits = limits
        self._guard = guard or MemoryGuard()
        self._wired_limit_bytes = wired_limit_bytes
        self.allocator: Allocator = NoAllocator()  # MLX's from the first load on
        self._feature_bytes = feature_bytes
        self.pictures = Pictures(images or ImagePolicy(), self._guard)
        self._cache = cache
        self.tier = HotTier(cache.hot_bytes)
        self._threads = ThreadPoolExecutor(MAX_MODELS, thread_name_prefix="engine")
        self.disk = DiskCache(cache.disk if cache.enabled else None)
        self.registry: CacheRegistry | None = None  # from the first load on: it imports mlx

    def hooks(self, entry: CatalogEntry, options: LoadOptions) -> Sequence[Hook]:
        """None: models run as mlx-lm and mlx-vlm have them."""
        return ()

    def load(self, entry: CatalogEntry, options: LoadOptions, progress: ProgressSink) -> LoadedModel:
        allow_mlx_lm(entry.name)
        # Imported here, not above: it takes seconds, and a daemon without a model must start in a blink.
        from omlxd.engine import engine, loader  # noqa: F401
        from omlxd.engine.kv_cost import costs_of

        if isinstance(self.allocator, NoAllocator):
            self.allocator = MlxAllocator(self._guard.limits.ceilings.static, self._wired_limit_bytes)
            self._guard.weigh_process()
        loaded = loader.load(entry, options, progress=progress, feature_bytes=self._feature_bytes)
        loaded = replace(loaded, costs=costs_of(loaded))
        return self._with_cache(loaded, entry, options) if self._cache.enabled else loaded

    def start(self, loaded: LoadedModel) -> Engine:
        from omlxd.engine.engine import Engine

        return Engine(
            loaded,
            self._limits,
            threads=self._threads,
            guard=self._guard,
            pictures=self.pictures,
            picture_bytes=self._feature_bytes,
        )

    def close(self) -> None:
        """Lets the engine threads go, once every engine has ended."""
        self._threads.shutdown(wait=False)
        self.pictures.close()

    # -- the caches, for any thread -----------------------------------------------------------------------------------

    @property
    def caches_prompts(self) -> bool:
        return self._cache.enabled

    def tier_stats(self) -> TierStats:
        return self.tier.stats()

    @property
    def queued_bytes(self) -> int:
        """What waits to be written to disk and is not counted in the tier: it has left memory, or never had room."""
        return max(0, self.disk.queued_bytes - self.tier.stats().offered_bytes)

    def cache_stats(self) -> Mapping[str, CacheStats]:
        """By model, of those that have been loaded. Takes as long as there are blocks."""
        caches = {} if self.registry is None else self.registry.by_name()
        return {name: cache.stats() for name, cache in caches.items()}

    def clear_caches(self, model: str | None) -> int:
        """Drops what is stored for one model, or for all, and gives its memory back; returns the bytes."""
        if self.registry is None:
            return 0
        import mlx.core as mx  # a registry means that it is loaded already

        caches = self.registry.by_name()
        freed = sum(cache.clear() for name, cache in caches.items() if model in (None, name))
        mx.clear_cache()  # what was dropped would otherwise stay in MLX's own pool
        return freed

    def _with_cache(self, loaded: LoadedModel, entry: CatalogEntry, options: LoadOptions) -> LoadedModel:
        from omlxd.cache.errors import UnreadableModel, UnsupportedLayout
        from omlxd.cache.identity import identify
        from omlxd.cache.layouts import ModelLayout
        from omlxd.cache.registry import CacheRegistry
        from omlxd.cache.ssd_format import Model
        from omlxd.engine.prefill import new_caches

        if self.registry is None:
            self.registry = CacheRegistry(self.tier)
        try:
            layout = ModelLayout(new_caches(loaded.model))
            identity = identify(
                entry.path,
                layout=layout.signature,
                block_size=self._cache.block_size,
                adapter=Path(options.adapter) if options.adapter else None,
                precision=_precisions(loaded),
            )
        except (UnsupportedLayout, UnreadableModel) as exc:
            log.warning("%s runs without a prefix cache: %s", entry.name, exc)
            return replace(loaded, uncached=str(exc))
        store = self._on_disk(Model.of(layout, identity.digest, identity.block_size, entry.name))
        cache = self.registry.open(entry.name, identity, layout, store=store)
        if store is not None:
            store.feed_from(cache.offers)
        return replace(loaded, cache=cache, store=store)

    def _on_disk(self, model: Model) -> ModelStore | None:
        store = self.disk.open()
        return store.view(model) if store is not None else None


def _precisions(loaded: LoadedModel) -> str:
    """The weights' data types and the device: what else decides the numbers that are stored."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    weights = cast("list[tuple[str, mx.array]]", tree_flatten(loaded.model.parameters()))  # type: ignore[no-untyped-call]
    types = sorted({str(array.dtype) for _, array in weights})
    return f"{mx.default_device().type} {' '.join(types)}"
