"""The caches of all models, by identity, over one hot tier.

Models keep theirs side by side and across unloading: a PrefixCache holds no model. Called by whoever loads models and
by the daemon, on any thread; its own lock guards a dict and is never held together with the tier's.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from omlxd.cache.hot import HotTier
from omlxd.cache.identity import CacheIdentity
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import CacheStats, PrefixCache
from omlxd.cache.store import BlockStore


class CacheRegistry:
    """Owns every PrefixCache and closes it."""

    def __init__(self, tier: HotTier) -> None:
        self.tier = tier
        self._lock = threading.Lock()
        self._caches: dict[CacheIdentity, PrefixCache] = {}
        self._names: dict[str, CacheIdentity] = {}

    def open(
        self, name: str, identity: CacheIdentity, layout: ModelLayout, *, store: BlockStore | None = None
    ) -> PrefixCache:
        """The cache of model `name` in this configuration: the one it had, with all it stored, or a new one.

        Another identity under the same name (new weights, adapter, KV precision) retires the old one's cache, unless
        another name uses it too. To be used by one engine thread at a time.
        """
        with self._lock:
            retired = self._names.get(name)
            self._names[name] = identity
            unused = retired if retired is not None and retired not in self._names.values() else None
            old = self._caches.pop(unused, None) if unused is not None else None
            cache = self._caches.get(identity)
            if cache is None:
                cache = self._caches[identity] = PrefixCache(
                    root=identity.digest,
                    layout=layout,
                    tier=self.tier,
                    block_size=identity.block_size,
                    store=store,
                )
        if old is not None:
            old.close()
        return cache

    def close(self, identity: CacheIdentity) -> None:
        """Drops one model's cache; unknown identities are none of ours and are ignored."""
        with self._lock:
            cache = self._caches.pop(identity, None)
            self._names = {name: kept for name, kept in self._names.items() if kept != identity}
        if cache is not None:
            cache.close()

    def close_all(self) -> None:
        with self._lock:
            caches = list(self._caches.values())
            self._caches, self._names = {}, {}
        for cache in caches:
            cache.close()

    def by_name(self) -> Mapping[str, PrefixCache]:
        """The cache of every model that has been loaded, whether it still is or not. Two names may share one."""
        with self._lock:
            return {name: self._caches[identity] for name, identity in self._names.items()}

    def stats(self) -> Mapping[CacheIdentity, CacheStats]:
        with self._lock:
            caches = dict(self._caches)
        return {identity: cache.stats() for identity, cache in caches.items()}

    def check(self) -> None:
        """Raises CacheInvariantError when any cache, or all of them together, do not add up to the tier."""
        with self._lock:
            caches: Sequence[PrefixCache] = list(self._caches.values())
        for cache in caches:
            cache.check()
