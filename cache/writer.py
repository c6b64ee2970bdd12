"""Putting a request's state into the prefix tree: cutting, making room, linking, evaluating, in this order.

Belongs to one PrefixCache and works on the model's engine thread. What is to be cut is decided and what was cut is
linked under the hot tier's lock; cutting and evaluating happen outside it. Between the two, everything that the work
builds on is pinned. Caches are read and left as they are. What memory has no room for goes to the store right away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from weakref import ref

import mlx.core as mx

from omlxd.cache.cutting import Job, is_better, pieces_of
from omlxd.cache.entries import Block, Checkpoint, block_nbytes, states_nbytes
from omlxd.cache.errors import CacheInvariantError
from omlxd.cache.hot import HotTier
from omlxd.cache.keys import BlockSpec, MediaSpan, chain, first_tokens, pack
from omlxd.cache.layouts import Held, Leaf, ModelLayout
from omlxd.cache.pieces import Piece
from omlxd.cache.store import BLOCK, CHECKPOINT, BlockStore, Name, Offer, StoredBlock, StoredCheckpoint
from omlxd.cache.tree import PrefixTree
from omlxd.cache.tree_view import Node


@dataclass(slots=True)
class WriterCounts:
    """Since the cache was opened. `refused` are blocks and checkpoints for which there was no room."""

    blocks: int = 0
    checkpoints: int = 0
    refused: int = 0


class Writer:
    """The writing half of a PrefixCache; its public methods are explained there."""

    def __init__(
        self,
        *,
        root: bytes,
        layout: ModelLayout,
        tier: HotTier,
        tree: PrefixTree,
        block_size: int,
        store: BlockStore | None,
    ) -> None:
        self.counts = WriterCounts()
        self._root = root
        self._layout = layout
        self._tier = tier
        self._tree = tree
        self._block_size = block_size
        self._store = store

    def publish(
        self, tokens: Sequence[int], caches: Sequence[Leaf], upto: int, media: Sequence[MediaSpan], since: int
    ) -> int:
        if not self._layout.sliceable:
            return 0  # nothing can be cut: such a model stores blocks with its checkpoints
        path: list[Block] = []
        try:
            return self._publish(path, self._specs(tokens[:upto], media), caches, upto, since)
        finally:
            self.release(path)

    def checkpoint(
        self, tokens: Sequence[int], caches: Sequence[Leaf], position: int, media: Sequence[MediaSpan], since: int
    ) -> bool:
        if not self._layout.recurrent or position < 1:
            self.publish(tokens, caches, position, media, since)
            return False
        if any(held.stop != position for held in self._layout.held(caches, position)):
            raise CacheInvariantError(f"a checkpoint at {position} was asked of caches that stand elsewhere")
        path: list[Block] = []
        specs = self._specs(tokens[:position], media)
        if not self._layout.sliceable:
            since = 0  # what was published had no blocks; they are no more than token ids
        try:
            self._publish(path, specs, caches, position, since)
            return self._attach(path, specs, caches)
        finally:
            self.release(path)

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
        self, path: list[Block], specs: Sequence[BlockSpec], caches: Sequence[Leaf], upto: int, since: int
    ) -> int:
        """Pins the stored blocks of the first `upto` tokens, adds them to `path`, and returns how many were cut."""
        held = self._layout.held(caches, upto)
        with self._tier.lock:
            if self._tree.closed or not (self._tier.budget_locked or self._store):
                return 0
            there, jobs = self._plan(specs)
            for block in there:
                self._tier.touch_locked(block)
                self._tier.pin_locked(block)
                path.append(block)
        changed, rest = self._linked(path, jobs, held)
        self._computed(changed)
        self._spill([job for job in rest if job.block is None and job.spec.stop > since], specs, held)
        return len(changed)

    def _plan(self, specs: Sequence[BlockSpec]) -> tuple[list[Block], list[Job]]:
        """The blocks that are there already, and what is to be cut, both in order."""
        path: list[Block] = []
        jobs: list[Job] = []
        for spec in specs:
            block = self._tree.covering(path, spec)
            if block is None:
                donor, run = self._tree.donor(path, spec) or (None, 0)
                missing = [Job(spec, None, donor.pieces if donor else (), run)]
                return path, [*jobs, *missing, *(Job(later) for later in specs[len(path) + 1 :])]
            if block.gaps and block.spec.key != spec.key:  # longer than this partial block, and worse
                return path, [*jobs, Job(spec, None, block.pieces, spec.num_tokens)]
            if block.gaps:
                jobs.append(Job(spec, block, block.pieces, spec.num_tokens))
            path.append(block)
        return path, jobs

    def _linked(
        self, path: list[Block], jobs: Sequence[Job], held: Sequence[Held]
    ) -> tuple[list[Block], Sequence[Job]]:
        """Cuts blocks and links them as far as they fit; returns them, and what did not fit any more.

        Extends `path`; what is new is pinned.
        """
        changed: list[Block] = []
        for number, job in enumerate(jobs):
            pieces = pieces_of(job, held)
            if job.block is not None and not is_better(pieces, job.block):
                continue
            if self._tree.closed or (path and not path[-1].alive):
                return changed, []  # the model's cache was closed or cleared meanwhile
            block = self._link(path, job, pieces)
            if block is None:
                self.counts.refused += 1
                return changed, jobs[number:]
            changed.append(block)
        return changed, []

    def _link(self, path: list[Block], job: Job, pieces: Sequence[Piece]) -> Block | None:
        """None if there is no room."""
        before = job.block.nbytes if job.block else 0
        with self._tier.lock:
            fits, gone = self._tier.make_room_locked(block_nbytes(job.spec, pieces) - before)
            if not fits:
                block = None
            elif job.block is not None:
                block = job.block
                self._tree.replace(block, pieces)
            else:
                block = self._tree.link(path, job.spec, pieces)
                self._tier.pin_locked(block)
                path.append(block)
        del gone  # outside the lock: this frees arrays
        return block

    def _computed(self, changed: Sequence[Block]) -> None:
        """Evaluates what was linked, so that other threads may read it. If that fails, nothing of the model is kept."""
        done = False
        try:
            mx.eval([piece.arrays for block in changed for piece in block.pieces])
            done = True
        finally:
            if not done:
                with self._tier.lock:
                    self._tree.clear()
        self.counts.blocks += len(changed)
        with self._tier.lock:
            for block in changed:
                block.computed = True
        for block in changed:
            self._offer(block, StoredBlock(self._parent_key(block), block.spec, block.pieces))

    def _offer(self, entry: Block | Checkpoint, record: StoredBlock | StoredCheckpoint) -> None:
        if self._store is not None:
            with self._tier.lock:
                offer = self._offer_locked(entry, record)
            self._store.offer(offer)

    def _offer_locked(self, entry: Block | Checkpoint, record: StoredBlock | StoredCheckpoint) -> Offer:
        """The entry as an offer, whose answer it will have, unless it has gone by then: an offer keeps nothing here."""
        self._tier.offered_locked(entry)
        kept, tier = ref(entry), self._tier

        def tell(is_kept: bool) -> None:
            there = kept()
            if there is not None:
                tier.settle(there, on_disk=is_kept)

        return Offer(record, tell)

    def _spill(self, jobs: Sequence[Job], specs: Sequence[BlockSpec], held: Sequence[Held]) -> None:
        """Hands blocks that memory has no room for to the store, as far as it takes them."""
        if self._store is None:
            return
        for number, job in enumerate(jobs):
            pieces = pieces_of(job, held)
            if not self._store.takes(block_nbytes(job.spec, pieces)):
                self._store.missed([(BLOCK, rest.spec.key) for rest in jobs[number:]])
                return
            mx.eval([piece.arrays for piece in pieces])
            self._store.offer(Offer(StoredBlock(self._before(specs, job.spec), job.spec, pieces)))

    def _attach(self, path: Sequence[Block], specs: Sequence[BlockSpec], caches: Sequence[Leaf]) -> bool:
        """Hangs the caches' recurrent state on the last of the blocks, unless it is there or has no room."""
        spec = specs[-1]
        block = path[-1] if len(path) == len(specs) else None
        if self._tree.closed or (block is None and self._store is None):
            return False
        with self._tier.lock:
            there = block.checkpoints.get(spec.stop) if block is not None else None
            if there is not None and there.alive:
                self._tier.touch_locked(there)
                return True
        states = self._layout.checkpoint(caches)
        mx.eval(states)
        record = StoredCheckpoint(self._before(specs, spec), spec, states)
        stored = block is not None and self._hang(block, record)
        self.counts.checkpoints += stored
        self.counts.refused += not stored
        if not stored and self._store is not None:
            offer = Offer(record)
            self._store.offer(offer) if self._store.takes(offer.nbytes) else self._store.missed([offer.name])
        return stored

    def _hang(self, block: Block, record: StoredCheckpoint) -> bool:
        """Hangs a checkpoint on a block and offers it; False if there is no room."""
        nbytes = states_nbytes(record.states)
        with self._tier.lock:
            fits, gone = self._tier.make_room_locked(nbytes)
            stored = fits and block.alive and not self._tree.closed
            entry = self._tree.attach(block, record.spec, record.states, nbytes) if stored else None
        del gone  # outside the lock: this frees arrays
        if entry is not None:
            self._offer(entry, record)
        return stored

    def offers(self, names: Collection[Name]) -> list[Offer]:
        found: list[Offer] = []
        with self._tier.lock:
            for block in self._tree.blocks():
                parent = self._parent_key(block)
                if block.computed and (BLOCK, block.spec.key) in names:
                    found.append(self._offer_locked(block, StoredBlock(parent, block.spec, block.pieces)))
                for checkpoint in block.checkpoints.values():
                    spec = first_tokens(parent, block.spec, checkpoint.position)
                    if (CHECKPOINT, spec.key) in names:
                        record = StoredCheckpoint(parent, spec, checkpoint.states)
                        found.append(self._offer_locked(checkpoint, record))
        return found

    def nodes(self, limit: int) -> list[Node]:
        with self._tier.lock:
            entries = sorted(self._tree.entries(), key=lambda entry: entry.last_use, reverse=True)
            return [self._node(entry) for entry in entries[:limit]]

    def _node(self, entry: Block | Checkpoint) -> Node:
        block = entry if isinstance(entry, Block) else entry.block
        parent, spec = self._parent_key(block), block.spec
        if isinstance(entry, Checkpoint):
            spec = first_tokens(parent, spec, entry.position)
        return Node(
            spec.key.hex(),
            parent.hex(),
            spec.start,
            spec.tokens,
            isinstance(entry, Checkpoint),
            entry.nbytes,
            entry.pins,
            hot=True,
        )

    def _specs(self, tokens: Sequence[int], media: Sequence[MediaSpan]) -> list[BlockSpec]:
        return chain(self._root, pack(tokens), media, self._block_size)

    def _parent_key(self, block: Block) -> bytes:
        return block.parent.spec.key if block.parent else self._root

    def _before(self, specs: Sequence[BlockSpec], spec: BlockSpec) -> bytes:
        """The key of the block before `spec` in its chain."""
        at = spec.start // self._block_size
        return specs[at - 1].key if at else self._root
