"""The prefix cache of one model: what a scheduler asks for, stores, and is told.

Lives on the model's engine thread: every method but `stats`, `check` and `close` is called there, because they compute
with the model's arrays. The tree and the byte budget are shared ground and are touched under the hot tier's lock only
(see hot.py), which is never held while mlx computes. Caches that go in are read and left as they are; caches that come
out belong to the caller, and nothing done to them reaches what is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from omlxd.cache.entries import Block, Checkpoint, Match
from omlxd.cache.explain import Explanation, explanation
from omlxd.cache.hot import HotTier
from omlxd.cache.keys import BlockSpec, MediaSpan, chain, pack, unpack
from omlxd.cache.layouts import Leaf, ModelLayout
from omlxd.cache.restoration import Restoration
from omlxd.cache.restoring import Restoring
from omlxd.cache.store import BlockStore, Name, Offer, StoredBlock, StoredCheckpoint
from omlxd.cache.tree import PrefixTree
from omlxd.cache.tree_view import Node
from omlxd.cache.writer import Writer


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was opened, and what it holds now. A lookup that reuses no token is a miss."""

    lookups: int
    hits: int
    lookup_tokens: int
    reused_tokens: int
    computed_tokens: int
    published_blocks: int
    published_checkpoints: int
    refused: int
    evicted: int
    blocks: int
    checkpoints: int
    nbytes: int
    pinned_nbytes: int


@dataclass(frozen=True, slots=True)
class Standing:
    """A prompt's blocks: the first `blocks` are in memory, and `position` of at most `limit` tokens are usable."""

    specs: Sequence[BlockSpec]
    position: int
    blocks: int
    limit: int


class Hit:
    """Caches that stand at `num_tokens`, the caller's own; what they were made from stays stored until `release`."""

    def __init__(self, cache: PrefixCache, caches: list[Leaf], match: Match) -> None:
        self.caches = caches
        self.num_tokens = match.position
        self._cache = cache
        self._pinned = _entries(match)

    def release(self) -> None:
        """Lets eviction have the blocks again. Idempotent; the caches stay good."""
        pinned, self._pinned = self._pinned, []
        self._cache.release(pinned)


@dataclass(slots=True)
class _Counts:
    lookups: int = 0
    hits: int = 0
    lookup_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0


class PrefixCache:
    """One model's stored prefixes. Made by CacheRegistry.open."""

    def __init__(
        self,
        *,
        root: bytes,
        layout: ModelLayout,
        tier: HotTier,
        block_size: int = 256,
        store: BlockStore | None = None,
    ) -> None:
        """`root` is the digest of the model's identity."""
        self.block_size = block_size
        self._root = root
        self._layout = layout
        self._restoring = Restoring(layout)
        self._tier = tier
        self._store = store
        self._tree = PrefixTree(tier, block_size, needs=layout.needs, recurrent=self.recurrent)
        self._writer = Writer(root=root, layout=layout, tier=tier, tree=self._tree, block_size=block_size, store=store)
        self._counts = _Counts()

    @property
    def recurrent(self) -> bool:
        """Whether the model has state that cannot be cut, so that prefixes are usable at checkpoints only."""
        return bool(self._layout.recurrent)

    @property
    def publish_stride(self) -> int:
        """Publish at least once in so many computed tokens, up to the last of them, and no window leaf loses a row.

        The block size, or less for a model whose windows are smaller than a block.
        """
        return min(self.block_size, self._layout.window or self.block_size)

    # -- reading ------------------------------------------------------------------------------------------------------

    def match_length(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> int:
        """How many tokens `lookup` would reuse now. Restores, counts and pins nothing."""
        specs = self._specs(tokens, media)
        with self._tier.lock:
            return self._tree.match(specs, media, self._limit(tokens)).position

    def standing(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> Standing:
        """What `lookup` would find in memory now, for a colder tier to go on from. Counts and pins nothing."""
        specs = self._specs(tokens, media)
        with self._tier.lock:
            position = self._tree.match(specs, media, self._limit(tokens)).position
            return Standing(specs, position, len(self._tree.path(specs)), self._limit(tokens))

    def lookup(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> Hit:
        """Caches for the longest stored prefix of at most len(tokens) - 1 tokens: one is left to compute logits from.

        Always succeeds; with nothing stored the caches are empty. `media` are all pictures of the prompt, in order.
        """
        specs = self._specs(tokens, media)
        with self._tier.lock:
            match = self._tree.match(specs, media, self._limit(tokens))
            for entry in _entries(match):
                self._tier.pin_locked(entry)
        done = False
        try:
            hit = Hit(self, self._restoring.caches(match), match)
            done = True
        finally:
            if not done:
                self.release(_entries(match))
        with self._tier.lock:
            is_overdrawn = self._tier.is_overdrawn_locked
        if is_overdrawn:
            hit.release()  # what has no room in memory was only there to be restored
        if self._store is not None and match.blocks:
            self._store.used(block.spec.key for block in match.blocks)
        self._counts.lookups += 1
        self._counts.lookup_tokens += len(tokens)
        self._counts.hits += match.position > 0
        self._counts.reused_tokens += match.position
        return hit

    def sharing(self) -> AbstractContextManager[None]:
        """Inside, lookups that find the same prefix one after another get caches with the same arrays, until they part.

        A copy of the latest prefix is kept for that, and let go at the end.
        """
        return self._restoring.sharing()

    def count_computed(self, num_tokens: int) -> None:
        """So many tokens of a looked-up prompt were not stored and have been computed."""
        self._counts.computed_tokens += num_tokens

    def explain(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> Explanation:
        """Why no more of this prompt would be reused."""
        specs = self._specs(tokens, media)
        with self._tier.lock:
            usable = self._tree.match(specs, media, self._limit(tokens)).position
            reach, block = self._tree.reach(specs)
        stored = unpack(block.spec.tokens)[reach - block.spec.start :] if block else []
        return explanation(tokens, media, usable=usable, reach=reach, stored=stored, recurrent=self.recurrent)

    def _specs(self, tokens: Sequence[int], media: Sequence[MediaSpan]) -> list[BlockSpec]:
        return chain(self._root, pack(tokens), media, self.block_size)

    @staticmethod
    def _limit(tokens: Sequence[int]) -> int:
        return max(0, len(tokens) - 1)

    # -- writing ------------------------------------------------------------------------------------------------------

    def publish(
        self,
        tokens: Sequence[int],
        caches: Sequence[Leaf],
        upto: int,
        media: Sequence[MediaSpan] = (),
        *,
        since: int = 0,
    ) -> int:
        """Stores the blocks of the first `upto` tokens that are not stored yet; returns how many memory took.

        What memory has no room for is handed to the colder tier, but for the first `since` tokens: those were published
        before, or came from there. `caches` belong to one request (no batch) and have computed at least `upto` tokens
        of it. The last block may be partial. Rows that have left a window layer's ring are left out: the block is then
        usable from where its windows are whole. Raises CacheInvariantError when the caches have not come as far.
        """
        return self._writer.publish(tokens, caches, upto, media, since)

    def checkpoint(
        self,
        tokens: Sequence[int],
        caches: Sequence[Leaf],
        position: int,
        media: Sequence[MediaSpan] = (),
        *,
        since: int = 0,
    ) -> bool:
        """Stores the recurrent state after the first `position` tokens, which is where the caches must stand.

        The blocks up to there are published too. Returns whether the checkpoint is in memory now; for a model without
        recurrent leaves this only publishes, and is False. Raises CacheInvariantError when the caches stand elsewhere.
        """
        return self._writer.checkpoint(tokens, caches, position, media, since)

    def adopt(
        self,
        tokens: Sequence[int],
        records: Sequence[StoredBlock | StoredCheckpoint],
        media: Sequence[MediaSpan] = (),
    ) -> int:
        """Takes in what a store has read for this prompt: blocks in order, each checkpoint after the block it is in.

        As `Restoration.add`, within the budget and at once. Returns how many were taken.
        """
        restoration = self.restoration(tokens, media)
        for record in records:
            restoration.add(record)
        restoration.release()
        return restoration.taken

    def restoration(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> Restoration:
        """For what is going to be read of a prompt, more than memory has now; the caller's, to be released."""
        return Restoration(
            root=self._root,
            tier=self._tier,
            tree=self._tree,
            specs=self._specs(tokens, media),
            block_size=self.block_size,
            release=self._writer.release,
        )

    def offers(self, names: Collection[Name]) -> list[Offer]:
        """Those of the named blocks and checkpoints that are here, parents first, each of which must be answered.

        For any thread: their arrays are evaluated.
        """
        return self._writer.offers(names)

    def nodes(self, limit: int) -> list[Node]:
        """Those used last, for people to look at. For any thread."""
        return self._writer.nodes(limit)

    def fresh(self) -> list[Leaf]:
        """Empty caches of the model, the caller's own."""
        return self._layout.fresh()

    def release(self, entries: Sequence[Block | Checkpoint]) -> None:
        """Ends the pins of a hit, and evicts what had no room but for them."""
        self._writer.release(entries)

    # -- as a whole ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drops everything stored, pinned or not; from then on all lookups miss. For any thread.

        Caches that were handed out stay good.
        """
        with self._tier.lock:
            self._tree.closed = True
            gone = self._tree.clear()
        del gone  # outside the lock: this frees arrays

    def clear(self) -> int:
        """Drops everything stored, pinned or not, and goes on; returns its bytes. For any thread."""
        with self._tier.lock:
            gone = self._tree.clear()
        return sum(entry.nbytes for entry in gone)

    def stats(self) -> CacheStats:
        with self._tier.lock:
            entries = self._tree.entries()
            return CacheStats(
                lookups=self._counts.lookups,
                hits=self._counts.hits,
                lookup_tokens=self._counts.lookup_tokens,
                reused_tokens=self._counts.reused_tokens,
                computed_tokens=self._counts.computed_tokens,
                published_blocks=self._writer.counts.blocks,
                published_checkpoints=self._writer.counts.checkpoints,
                refused=self._writer.counts.refused,
                evicted=self._tree.evicted(),
                blocks=sum(isinstance(entry, Block) for entry in entries),
                checkpoints=sum(isinstance(entry, Checkpoint) for entry in entries),
                nbytes=sum(entry.nbytes for entry in entries),
                pinned_nbytes=sum(entry.nbytes for entry in entries if entry.pins),
            )

    def check(self) -> None:
        """Raises CacheInvariantError when the tree, its bytes or its tier do not add up."""
        with self._tier.lock:
            self._tree.check()
        self._tier.check()


def _entries(match: Match) -> list[Block | Checkpoint]:
    return [*match.blocks, *([match.checkpoint] if match.checkpoint else [])]
