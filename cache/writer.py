"""Putting a request's state into the prefix tree: cutting, making room, linking, evaluating, in this order.

Belongs to one PrefixCache and works on the model's engine thread. What is to be cut is decided and what was cut is
linked under the hot tier's lock; cutting and evaluating happen outside it. Between the two, everything that the work
builds on is pinned. Caches are read and left as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx

from omlxd.cache.cutting import Job, is_better, pieces_of
from omlxd.cache.entries import Block, Checkpoint, block_nbytes, states_nbytes
from omlxd.cache.errors import CacheInvariantError
from omlxd.cache.hot import Entry, HotTier
from omlxd.cache.keys import BlockSpec, MediaSpan, chain, first_tokens, pack
from omlxd.cache.layouts import Leaf, ModelLayout
from omlxd.cache.pieces import Piece
from omlxd.cache.store import BLOCK, CHECKPOINT, BlockStore, Name, StoredBlock, StoredCheckpoint
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

    def publish(self, tokens: Sequence[int], caches: Sequence[Leaf], upto: int, media: Sequence[MediaSpan] = ()) -> int:
        if not self._layout.sliceable:
            return 0  # nothing can be cut: such a model stores blocks with its checkpoints
        path: list[Block] = []
        try:
            return self._publish(path, tokens, caches, upto, media)
        finally:
            self.release(path)

    def checkpoint(
        self, tokens: Sequence[int], caches: Sequence[Leaf], position: int, media: Sequence[MediaSpan] = ()
    ) -> bool:
        if not self._layout.recurrent or position < 1:
            self.publish(tokens, caches, position, media)
            return False
        if any(held.stop != position for held in self._layout.held(caches, position)):
            raise CacheInvariantError(f"a checkpoint at {position} was asked of caches that stand elsewhere")
        path: list[Block] = []
        try:
            self._publish(path, tokens, caches, position, media)
            return self._attach(path, self._specs(tokens[:position], media), caches)
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
        self,
        path: list[Block],
        tokens: Sequence[int],
        caches: Sequence[Leaf],
        upto: int,
        media: Sequence[MediaSpan],
    ) -> int:
        """Pins the stored blocks of the first `upto` tokens, adds them to `path`, and returns how many were cut."""
        held = self._layout.held(caches, upto)
        specs = self._specs(tokens[:upto], media)
        with self._tier.lock:
            if self._tree.closed or not self._tier.budget_locked:
                return 0
            there, jobs = self._plan(specs)
            for block in there:
                self._tier.touch_locked(block)
                self._tier.pin_locked(block)
                path.append(block)
        cuts = [(job, pieces_of(job, held)) for job in jobs]
        changed = self._linked(path, cuts)
        self._computed(changed)
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

    def _linked(self, path: list[Block], cuts: Sequence[tuple[Job, list[Piece]]]) -> list[Block]:
        """Makes room for the cut blocks and links them, as far as they fit. Extends `path`; what is new is pinned."""
        changed: list[Block] = []
        gone: list[Entry] = []
        with self._tier.lock:
            for job, pieces in cuts:
                if job.block is not None and not is_better(pieces, job.block):
                    continue
                before = job.block.nbytes if job.block else 0
                fits, evicted = self._tier.make_room_locked(block_nbytes(job.spec, pieces) - before)
                gone += evicted
                if not fits:
                    self.counts.refused += 1
                    break
                if self._tree.closed or (path and not path[-1].alive):
                    break  # the model's cache was closed or cleared meanwhile
                changed.append(self._link(path, job, pieces))
        del gone  # outside the lock: this frees arrays
        return changed

    def _link(self, path: list[Block], job: Job, pieces: Sequence[Piece]) -> Block:
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
                with self._tier.lock:
                    self._tree.clear()
        self.counts.blocks += len(changed)
        with self._tier.lock:
            for block in changed:
                block.computed = True
        if self._store is not None:
            for block in changed:
                self._store.offer(StoredBlock(self._parent_key(block), block.spec, block.pieces))

    def _attach(self, path: Sequence[Block], specs: Sequence[BlockSpec], caches: Sequence[Leaf]) -> bool:
        """Hangs the caches' recurrent state on the last of the blocks, unless it is there or has no room."""
        if len(path) < len(specs):
            return False
        spec, block = specs[-1], path[-1]
        with self._tier.lock:
            there = block.checkpoints.get(spec.stop)
            if there is not None and there.alive:
                self._tier.touch_locked(there)
                return True
        states = self._layout.checkpoint(caches)
        mx.eval(states)
        nbytes = states_nbytes(states)
        with self._tier.lock:
            fits, gone = self._tier.make_room_locked(nbytes)
            stored = fits and block.alive and not self._tree.closed
            if stored:
                self._tree.attach(block, spec, states, nbytes)
        del gone
        self.counts.checkpoints += stored
        self.counts.refused += not stored
        if stored and self._store is not None:
            self._store.offer(StoredCheckpoint(self._parent_key(block), spec, states))
        return stored

    def adopt(
        self,
        tokens: Sequence[int],
        records: Sequence[StoredBlock | StoredCheckpoint],
        media: Sequence[MediaSpan] = (),
    ) -> int:
        specs = self._specs(tokens, media)
        pinned: list[Block | Checkpoint] = []  # until all are in: none may push out what it hangs on
        gone: list[Entry] = []
        adopted = 0
        with self._tier.lock:
            path = self._tree.path(specs)
            self._pin(pinned, path)
            for record in records if not self._tree.closed else ():
                before = len(pinned)
                gone += self._adopt(path, record, pinned)
                adopted += len(pinned) - before
        self.release(pinned)
        del gone  # outside the lock: this frees arrays
        return adopted

    def _adopt(
        self, path: list[Block], record: StoredBlock | StoredCheckpoint, pinned: list[Block | Checkpoint]
    ) -> list[Entry]:
        """Links one record after `path`, if it fits there, and pins it. Returns what had to go."""
        at = record.spec.start // self._block_size
        if at > len(path) or record.parent != (path[at - 1].spec.key if at else self._root):
            return []
        there = self._tree.covering(path[:at], record.spec)
        if isinstance(record, StoredCheckpoint):
            return self._adopt_checkpoint(there, record, pinned) if there is not None else []
        if there is not None:
            return []
        fits, gone = self._tier.make_room_locked(block_nbytes(record.spec, record.pieces))
        if fits:
            block = self._tree.link(path[:at], record.spec, record.pieces)
            block.computed = True
            path[at:] = [block]
            self._pin(pinned, [block])
        return gone

    def _adopt_checkpoint(
        self, block: Block, record: StoredCheckpoint, pinned: list[Block | Checkpoint]
    ) -> list[Entry]:
        if record.spec.stop in block.checkpoints:
            return []
        nbytes = states_nbytes(record.states)
        self._tier.pin_locked(block)
        fits, gone = self._tier.make_room_locked(nbytes)
        if fits:
            self._pin(pinned, [self._tree.attach(block, record.spec, record.states, nbytes)])
        self._tier.unpin_locked(block)
        return gone

    def records(self, names: Collection[Name]) -> list[StoredBlock | StoredCheckpoint]:
        found: list[StoredBlock | StoredCheckpoint] = []
        with self._tier.lock:
            for block in self._tree.blocks():
                parent = self._parent_key(block)
                if block.computed and (BLOCK, block.spec.key) in names:
                    found.append(StoredBlock(parent, block.spec, block.pieces))
                for checkpoint in block.checkpoints.values():
                    spec = first_tokens(parent, block.spec, checkpoint.position)
                    if (CHECKPOINT, spec.key) in names:
                        found.append(StoredCheckpoint(parent, spec, checkpoint.states))
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

    def _pin(self, pinned: list[Block | Checkpoint], entries: Sequence[Block | Checkpoint]) -> None:
        for entry in entries:
            self._tier.pin_locked(entry)
            pinned.append(entry)

    def _specs(self, tokens: Sequence[int], media: Sequence[MediaSpan]) -> list[BlockSpec]:
        return chain(self._root, pack(tokens), media, self._block_size)

    def _parent_key(self, block: Block) -> bytes:
        return block.parent.spec.key if block.parent else self._root
