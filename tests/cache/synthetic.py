"""Caches whose every number says which prompt it belongs to: a model's work without a model.

Row t of a leaf is a digest of tokens 0..t, the recurrent state one of all tokens so far. So a restored cache can be
checked exactly, for any layout, in microseconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import mlx.core as mx
import mlx_lm.models.cache as lm

from omlxd.cache.hot import HotTier
from omlxd.cache.keys import MediaSpan, pack
from omlxd.cache.layouts import LAYOUTS, Leaf, ModelLayout, class_name, leaves
from omlxd.cache.prefix import PrefixCache
from omlxd.cache.store import BlockStore, Name, Offer, StoredBlock, StoredCheckpoint

WINDOW = 6


def full() -> list[Leaf]:
    return [lm.KVCache()]


def windowed() -> list[Leaf]:
    return [lm.KVCache(), lm.RotatingKVCache(max_size=WINDOW)]


def sinks() -> list[Leaf]:
    return [lm.RotatingKVCache(max_size=WINDOW, keep=2)]


def hybrid() -> list[Leaf]:
    return [lm.CacheList(lm.KVCache(), lm.ArraysCache(size=2)), lm.RotatingKVCache(max_size=WINDOW)]


def recurrent() -> list[Leaf]:
    return [lm.ArraysCache(size=2)]


class Shelf:
    """A store that keeps everything it is offered, in order."""

    def __init__(self) -> None:
        self.records: list[StoredBlock | StoredCheckpoint] = []

    def offer(self, offer: Offer) -> None:
        self.records.append(offer.record)
        offer.tell(True)

    def takes(self, nbytes: int) -> bool:
        return True

    def missed(self, names: Iterable[Name]) -> None:
        raise AssertionError("it takes everything")

    def used(self, keys: Iterable[bytes]) -> None:
        """It forgets nothing, whatever is used."""


def new_cache(
    caches: Sequence[Leaf],
    tier: HotTier,
    *,
    block: int = 4,
    root: bytes = b"synthetic",
    store: BlockStore | None = None,
) -> PrefixCache:
    return PrefixCache(root=root, layout=ModelLayout(caches), tier=tier, block_size=block, store=store)


def digest(tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> float:
    """What a model would make of these tokens and of the pictures that begin before their end."""
    seen = b"".join(span.digest for span in media if span.start < len(tokens))
    return float(zlib.crc32(pack(tokens) + seen) % (1 << 20))


def feed(caches: Sequence[Leaf], tokens: Sequence[int], start: int, stop: int, media: Sequence[MediaSpan] = ()) -> None:
    """Computes tokens [start, stop) in one chunk."""
    values = [digest(tokens[: t + 1], media) for t in range(start, stop)]
    rows = mx.array(values)[None, None, :, None]
    for leaf in leaves(caches):
        if isinstance(leaf, lm.ArraysCache):
            leaf[1] = mx.array([[values[-1]]])
        else:
            leaf.update_and_fetch(rows, -rows)


def assert_restored(
    caches: Sequence[Leaf], tokens: Sequence[int], position: int, media: Sequence[MediaSpan] = ()
) -> None:
    """The caches hold what computing the first `position` tokens leaves behind."""
    for leaf in leaves(caches):
        if isinstance(leaf, lm.ArraysCache):
            if position:
                assert leaf[0] is None
                assert leaf[1].item() == digest(tokens[:position], media)
            continue
        held = LAYOUTS[class_name(leaf)].held(leaf)
        if position == 0:
            assert held is None
            continue
        assert held.stop == position
        here = [*range(held.sink), *range(held.first, held.stop)]
        assert held.arrays[0][0, 0, : len(here), 0].tolist() == [digest(tokens[: t + 1], media) for t in here]
        assert (held.arrays[0] == -held.arrays[1]).all().item()
