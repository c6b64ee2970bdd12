"""The prefix cache of one model: what a scheduler asks for, stores, and is told.

Lives on the model's engine thread: every method but `stats`, `check` and `close` is called there, because they compute
with the model's arrays. The tree and the byte budget are shared ground and are touched under the hot tier's lock only
(see hot.py), which is never held while mlx computes. Caches that go in are read and left as they are; caches that come
out belong to the caller, and nothing done to them reaches what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from omlxd.cache.errors import CacheInvariantError
from omlxd.cache.explain import Explanation, explanation
from omlxd.cache.hot import Entry, HotTier
from omlxd.cache.keys import BlockSpec, MediaSpan, chain, pack, unpack
from omlxd.cache.layouts import Held, Leaf, ModelLayout
from omlxd.cache.pieces import Piece, completed, cut, join
from omlxd.cache.store import BlockStore, StoredBlock, StoredCheckpoint
from omlxd.cache.tree import Block, Checkpoint, Match, PrefixTree, block_nbytes


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was opened, and what it holds now. A lookup that reuses no token is a miss."""

    lookups: int
    hits: int
    lookup_tokens: int
    reused_tokens: int
    published_blocks: int
    published_checkpoints: int
    refused: int
    blocks: int
    checkpoints: int
    nbytes: int
    pinned_nbytes: int


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
    published_blocks: int = 0
    published_checkpoints: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class _Job:
    """A block to be cut: new, or the stored `block`, whose gaps may now be filled.

    `donor` are the pieces of a block whose first `shared` tokens are the same.
    """

    spec: BlockSpec
    block: Block | None = None
    donor: Sequence[Piece] = ()
    shared: int = 0


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
        self._tier = tier
        self._seam = store
        self._tree = PrefixTree(tier, block_size, needs=layout.needs, recurrent=self.recurrent)
        self._counts = _Counts()
        self._closed = False

    @property
    def recurrent(self) -> bool:
        """Whether the model has state that cannot be cut, so that prefixes are usable at checkpoints only."""
        return bool(self._layout.recurrent)

    # -- reading ------------------------------------------------------------------------------------------------------

    def match_length(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> int:
        """How many tokens `lookup` would reuse now. Restores, counts and pins nothing."""
        specs = self._specs(tokens, media)
        with self._tier.lock:
            return self._tree.match(specs, media, self._limit(tokens)).position

    def lookup(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> Hit:
        """Caches for the longest stored prefix of at most len(tokens) - 1 tokens: one is left to compute logits from.

        Always succeeds; with nothing stored the caches are empty. `media` are all pictures of the prompt, in order.
        """
        specs = self._specs(tokens, media)
        with self._tier.lock:
            match = self._tree.match(specs, media, self._limit(tokens))
            for entry in _entries(match):
                self._tier.pin_locked(entry)
        self._counts.lookups += 1
        self._counts.lookup_tokens += len(tokens)
        self._counts.hits += match.position > 0
        self._counts.reused_tokens += match.position
        return Hit(self, self._restored(match), match)

    def explain(self, tokens: Sequence[int], media: Sequence[MediaSpan] = ()) -> Explanation:
        """Why no more of this prompt would be reused."""
        specs = self._specs(tokens, media)
        with self._tier.lock:
            usable = self._tree.match(specs, media, self._limit(tokens)).position
            reach, block = self._tree.reach(specs)
        stored = unpack(block.spec.tokens)[reach - block.spec.start :] if block else []
        return explanation(tokens, media, usable=usable, reach=reach, stored=stored, recurrent=self.recurrent)

    def _restored(self, match: Match) -> list[Leaf]:
        caches = self._layout.fresh()
        if match.position == 0:
            return caches
        rows = []
        for index, needs in enumerate(self._layout.needs(match.position)):
            pieces = [(block.spec.start, block.pieces[index]) for block in match.blocks]
            rows.append(join(pieces, needs, match.position))
        states = match.checkpoint.states if match.checkpoint else []
        mx.eval(rows)
        self._layout.fill(caches, rows, states, match.position)
        return caches

    def _specs(self, tokens: Sequence[int], media: Sequence[MediaSpan]) -> list[BlockSpec]:
        return chain(self._root, pack(tokens), media, self.block_size)

    @staticmethod
    def _limit(tokens: Sequence[int]) -> int:
        return max(0, len(tokens) - 1)

    # -- writing ------------------------------------------------------------------------------------------------------

    def publish(self, tokens: Sequence[int], caches: Sequence[Leaf], upto: int, media: Sequence[MediaSpan] = ()) -> int:
        """Stores the blocks of the first `upto` tokens that are not stored yet; returns how many blocks were cut.

        `caches` belong to one request (no batch) and have computed at least `upto` tokens of it. The last block may be
        partial. Blocks of which the caches no longer hold what a full-attention layer needs are not stored, nor what
        would follow them. Raises CacheInvariantError when the caches have not come as far as `upto`.
        """
        if not self._layout.sliceable:
            return 0  # nothing can be cut: such a model stores blocks with its checkpoints
        path, new = self._publish(tokens, caches, upto, media)
        self.release(path)
        return new

    def checkpoint(
        self, tokens: Sequence[int], caches: Sequence[Leaf], position: int, media: Sequence[MediaSpan] = ()
    ) -> bool:
        """Stores the recurrent state after the first `position` tokens, which is where the caches must stand.

        The blocks up to there are published too. Returns whether the checkpoint is stored now; for a model without
        recurrent leaves this only publishes, and is False. Raises CacheInvariantError when the caches stand elsewhere.
        """
        if not self.recurrent or position < 1:
            self.publish(tokens, caches, position, media)
            return False
        if any(held.stop != position for held in self._layout.held(caches, position)):
            raise CacheInvariantError(f"a checkpoint at {position} was asked of caches that stand elsewhere")
        path, _ = self._publish(tokens, caches, position, media)
        stored = self._attach(path, self._specs(tokens[:position], media), caches)
        self.release(path)
        return stored

    def release(self, entries: Sequence[Block | Checkpoint]) -> None:
        """Ends pins, and evicts what had no room but for them."""
        with self._tier.lock:
            for entry in entries:
                self._tier.unpin_locked(entry)
            for entry in entries:
                if isinstance(entry, Block):
                    self._tree.tidy(entry)
            _, gone = self._tier.make_room_locked(0)
        del gone  # outside the lock: this frees arrays

    def _publish(
        self, tokens: Sequence[int], caches: Sequence[Leaf], upto: int, media: Sequence[MediaSpan]
    ) -> tuple[list[Block], int]:
        """The stored blocks of the first `upto` tokens, all pinned once, and how many were cut now."""
        held = self._layout.held(caches, upto)
        specs = self._specs(tokens[:upto], media)
        with self._tier.lock:
            if self._closed or not self._tier.budget_locked:
                return [], 0
            path, jobs = self._plan(specs)
            for block in path:
                self._tier.touch_locked(block)
                self._tier.pin_locked(block)
        cuts = [(job, _pieces(job, held)) for job in jobs]
        changed = self._store(path, cuts)
        self._computed(changed)
        return path, len(changed)

    def _plan(self, specs: Sequence[BlockSpec]) -> tuple[list[Block], list[_Job]]:
        """The blocks that are there already, and what is to be cut, both in order."""
        path: list[Block] = []
        jobs: list[_Job] = []
        for spec in specs:
            block = self._tree.covering(path, spec)
            if block is None:
                donor, run = self._tree.donor(path, spec) or (None, 0)
                missing = [_Job(spec, None, donor.pieces if donor else (), run)]
                return path, [*jobs, *missing, *(_Job(later) for later in specs[len(path) + 1 :])]
            if block.gaps and block.spec.key != spec.key:  # longer than this partial block, and worse
                return path, [*jobs, _Job(spec, None, block.pieces, spec.num_tokens)]
            if block.gaps:
                jobs.append(_Job(spec, block, block.pieces, spec.num_tokens))
            path.append(block)
        return path, jobs

    def _store(self, path: list[Block], cuts: Sequence[tuple[_Job, list[Piece]]]) -> list[Block]:
        """Makes room for the cut blocks and links them, as far as they fit. Extends `path`; what is new is pinned."""
        changed: list[Block] = []
        gone: list[Entry] = []
        with self._tier.lock:
            for job, pieces in cuts:
                if job.block is not None and not _better(pieces, job.block):
                    continue
                before = job.block.nbytes if job.block else 0
                fits, evicted = self._tier.make_room_locked(block_nbytes(job.spec, pieces) - before)
                gone += evicted
                if self._closed or not fits:
                    self._counts.refused += 1
                    break
                changed.append(self._link(path, job, pieces))
        del gone  # outside the lock: this frees arrays
        return changed

    def _link(self, path: list[Block], job: _Job, pieces: Sequence[Piece]) -> Block:
        if job.block is not None:
            self._tree.replace(job.block, pieces)
            return job.block
        block = self._tree.link(path, job.spec, pieces)
        self._tier.pin_locked(block)
        path.append(block)
        return block

    def _computed(self, changed: Sequence[Block]) -> None:
        """Evaluates what was linked, so that other threads may read it. If that fails, nothing of the model is kept."""
        done = False
        try:
            mx.eval([piece.arrays for block in changed for piece in block.pieces])
            done = True
        finally:
            if not done:
                self.clear()
        self._counts.published_blocks += len(changed)
        if self._seam is not None:
            for block in changed:
                self._seam.offer(StoredBlock(self._parent_key(block), block.spec, block.pieces))

    def _attach(self, path: Sequence[Block], specs: Sequence[BlockSpec], caches: Sequence[Leaf]) -> bool:
        """Hangs the caches' recurrent state on the last of the blocks, unless it is there or has no room."""
        if len(path) < len(specs):
            return False
        spec, block = specs[-1], path[-1]
        with self._tier.lock:
            if spec.stop in block.checkpoints:
                self._tier.touch_locked(block.checkpoints[spec.stop])
                return True
        states = self._layout.checkpoint(caches)
        mx.eval(states)
        nbytes = sum(slot.nbytes for state in states for slot in state if slot is not None)
        with self._tier.lock:
            fits, gone = self._tier.make_room_locked(nbytes)
            stored = fits and not self._closed
            if stored:
                self._tree.attach(block, spec, states, nbytes)
        del gone
        self._counts.published_checkpoints += stored
        self._counts.refused += not stored
        if stored and self._seam is not None:
            self._seam.offer(StoredCheckpoint(self._parent_key(block), spec, states))
        return stored

    def _parent_key(self, block: Block) -> bytes:
        return block.parent.spec.key if block.parent else self._root

    # -- as a whole ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drops everything stored, pinned or not; from then on all lookups miss. For any thread.

        Caches that were handed out stay good.
        """
        with self._tier.lock:
            self._closed = True
        self.clear()

    def clear(self) -> None:
        """Drops everything stored, pinned or not, and goes on. For any thread."""
        with self._tier.lock:
            gone = self._tree.entries()
            for entry in gone:
                self._tier.remove_locked(entry)
        del gone  # outside the lock: this frees arrays

    def stats(self) -> CacheStats:
        with self._tier.lock:
            entries = self._tree.entries()
            return CacheStats(
                lookups=self._counts.lookups,
                hits=self._counts.hits,
                lookup_tokens=self._counts.lookup_tokens,
                reused_tokens=self._counts.reused_tokens,
                published_blocks=self._counts.published_blocks,
                published_checkpoints=self._counts.published_checkpoints,
                refused=self._counts.refused,
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


def _pieces(job: _Job, held: Sequence[Held]) -> list[Piece]:
    """The block's pieces, lazy: what the caches hold of it, completed from the donor, each an array of its own."""
    donors: Sequence[Piece | None] = job.donor or [None] * len(held)
    return [_piece(job, leaf, donor) for leaf, donor in zip(held, donors, strict=True)]


def _piece(job: _Job, held: Held, donor: Piece | None) -> Piece:
    piece = cut(held, job.spec.start, job.spec.stop)
    if donor is not None:
        piece = completed(piece, donor, job.shared)
        if job.block is not None and len(donor.gap) <= len(piece.gap):
            return donor  # what is stored already is as good
    # A slice would keep the whole cache's buffer alive, and make the cache copy it at its next write.
    return replace(piece, arrays=tuple(mx.contiguous(array) for array in piece.arrays))


def _better(pieces: Sequence[Piece], block: Block) -> bool:
    return sum(len(p.gap) for p in pieces) < sum(len(p.gap) for p in block.pieces)
