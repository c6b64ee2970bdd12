"""A store of files in a test's directory, and the way back from it as an engine goes it, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from omlxd.cache.disk import Disk
from omlxd.cache.hot import HotTier
from omlxd.cache.keys import MediaSpan
from omlxd.cache.layouts import Leaf, ModelLayout
from omlxd.cache.prefix import PrefixCache
from omlxd.cache.restoration import Restoration
from omlxd.cache.sessions import Quota
from omlxd.cache.ssd import ModelStore, SsdStore
from omlxd.cache.ssd_format import Model
from omlxd.cache.ssd_reader import Unreadable
from tests.cache.running import BLOCK, PLENTY, model

WAIT_S = 60.0


def open_store(home: Path, *, max_bytes: int = PLENTY, min_free_bytes: int = 0, **changes: Any) -> SsdStore:
    """`home` is what is always there; the tier's directory is in it."""
    home.mkdir(exist_ok=True)
    return SsdStore(
        changes.pop("directory", home / "cache"),
        memo=home / "cache.json",
        max_bytes=max_bytes,
        min_free_bytes=min_free_bytes,
        quota=changes.pop("quota", Quota(1000, PLENTY)),
        disk=changes.pop("disk", Disk()),
        **changes,
    )


@dataclass
class Shelved:
    """A cache and its view of the store."""

    cache: PrefixCache
    view: ModelStore
    tier: HotTier

    def fetch(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> int:
        """Brings what the disk has of a prompt into memory, as far as there is room; returns how many records came."""
        restoration = self.restoration(tokens, media, beyond_budget=False)
        restoration.release()
        return restoration.taken

    def restoration(
        self, tokens: Sequence[int], media: Sequence[MediaSpan] = (), *, beyond_budget: bool = True
    ) -> Restoration:
        """Reads what the disk has of a prompt, for a lookup before the restoration is released."""
        plan = self.view.plan(self.cache.standing(tokens, media)).result(WAIT_S)
        restoration = self.cache.restoration(tokens, media)
        for step in plan.steps:
            try:
                record = self.view.read(step).result(WAIT_S)
            except Unreadable:
                break
            if not restoration.add(record, beyond_budget=beyond_budget, on_disk=step.record is None):
                break
        return restoration


def shelved(
    store: SsdStore, leaves: Sequence[Leaf], tier: HotTier | None = None, *, root: bytes = bytes(32), block: int = BLOCK
) -> Shelved:
    layout = ModelLayout(leaves)
    view = store.view(Model.of(layout, root, block))
    tier = HotTier(PLENTY) if tier is None else tier
    cache = PrefixCache(root=root, layout=layout, tier=tier, block_size=block, store=view)
    view.feed_from(cache.offers)
    return Shelved(cache, view, tier)


def of_model(store: SsdStore, name: str, tier: HotTier | None = None, **changes: Any) -> Shelved:
    """A cache of a tiny model."""
    return shelved(store, make_prompt_cache(model(name)), tier, **changes)


def flush(store: SsdStore) -> None:
    store.written().result(WAIT_S)
