"""What is read from a colder tier for one request, from the first record until the request has its caches.

Lives on the model's engine thread. What memory has of the prompt already, and every block that comes, is pinned, so
that nothing which is still to come can push out what it hangs on. The tier takes in as much as its budget allows; what
a prompt has beyond that is the request's own, in the tree like all else but over the budget, and goes as soon as the
request lets go. Whoever adds such blocks has found memory for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omlxd.cache.cutting import is_better
from omlxd.cache.entries import Block, Checkpoint, block_nbytes, states_nbytes
from omlxd.cache.hot import Entry, HotTier
from omlxd.cache.keys import BlockSpec
from omlxd.cache.store import StoredBlock, StoredCheckpoint
from omlxd.cache.tree import PrefixTree

Release = Callable[[Sequence[Block | Checkpoint]], None]


class Restoration:
    """One prompt's. Made by PrefixCache; `release` it once the caches are made, or not wanted any more."""

    def __init__(
        self,
        *,
        root: bytes,
        tier: HotTier,
        tree: PrefixTree,
        specs: Sequence[BlockSpec],
        block_size: int,
        release: Release,
    ) -> None:
        """`release` ends pins."""
        self.taken = 0  # records that were new
        self._root = root
        self._tier = tier
        self._tree = tree
        self._block_size = block_size
        self._release = release
        self._pinned: list[Block | Checkpoint] = []
        with tier.lock:
            self._path = tree.path(specs)
            for block in self._path:
                self._pin(block)

    def add(
        self, record: StoredBlock | StoredCheckpoint, *, beyond_budget: bool = False, on_disk: bool = False
    ) -> bool:
        """Takes in the next record: blocks in order, each checkpoint after the block it is in. False: it has no room.

        Its arrays are evaluated and the caller's no longer. One that is there already, or continues nothing that is
        here, is left out. With `beyond_budget` there always is room. `on_disk`: it was read from a file.
        """
        with self._tier.lock:
            if self._tree.closed or not self._continues(record):
                return True
            if isinstance(record, StoredCheckpoint):
                fits, gone = self._add_checkpoint(record, beyond_budget, on_disk)
            else:
                fits, gone = self._add_block(record, beyond_budget, on_disk)
        del gone  # outside the lock: this frees arrays
        return fits

    def release(self) -> None:
        """Ends the pins, and evicts what had no room but for them. Idempotent."""
        pinned, self._pinned = self._pinned, []
        self._release(pinned)

    def _continues(self, record: StoredBlock | StoredCheckpoint) -> bool:
        at = record.spec.start // self._block_size
        if at > len(self._path) or (self._path and not self._path[-1].alive):  # the cache was cleared meanwhile
            return False
        return record.parent == (self._path[at - 1].spec.key if at else self._root)

    def _add_block(self, record: StoredBlock, beyond: bool, on_disk: bool) -> tuple[bool, list[Entry]]:
        at = record.spec.start // self._block_size
        there = self._tree.covering(self._path[:at], record.spec)
        if there is not None and not there.gaps:
            return True, []
        if there is not None and there.spec.key == record.spec.key:
            return self._better(there, record, beyond, on_disk)
        # A longer block that lacks rows may not do what this one can: they stand side by side.
        fits, gone = self._tier.make_room_locked(block_nbytes(record.spec, record.pieces))
        if fits or beyond:
            block = self._tree.link(self._path[:at], record.spec, record.pieces)
            block.computed = True
            self._path[at:] = [block]
            self._add(block, on_disk)
        return fits or beyond, gone

    def _better(self, block: Block, record: StoredBlock, beyond: bool, on_disk: bool) -> tuple[bool, list[Entry]]:
        """Gives a block that lacks rows the record's of those leaves that have more of them there."""
        pieces = [min(pair, key=lambda piece: len(piece.gap)) for pair in zip(block.pieces, record.pieces, strict=True)]
        if not is_better(pieces, block):
            return True, []
        self._tier.pin_locked(block)  # it must not make room for itself
        fits, gone = self._tier.make_room_locked(block_nbytes(record.spec, pieces) - block.nbytes)
        if fits or beyond:
            self._tree.replace(block, pieces)
            block.computed = True
            is_record = all(piece is stored for piece, stored in zip(pieces, record.pieces, strict=True))
            self._path[record.spec.start // self._block_size :] = [block]
            self._add(block, on_disk and is_record)
        self._tier.unpin_locked(block)
        return fits or beyond, gone

    def _add_checkpoint(self, record: StoredCheckpoint, beyond: bool, on_disk: bool) -> tuple[bool, list[Entry]]:
        at = record.spec.start // self._block_size
        block = self._tree.covering(self._path[:at], record.spec)
        if block is None or record.spec.stop in block.checkpoints:
            return True, []
        nbytes = states_nbytes(record.states)
        self._tier.pin_locked(block)  # it must not make room for its own checkpoint
        fits, gone = self._tier.make_room_locked(nbytes)
        if fits or beyond:
            self._add(self._tree.attach(block, record.spec, record.states, nbytes), on_disk)
        self._tier.unpin_locked(block)
        return fits or beyond, gone

    def _add(self, entry: Block | Checkpoint, on_disk: bool) -> None:
        entry.on_disk = on_disk
        self._pin(entry)
        self.taken += 1

    def _pin(self, entry: Block | Checkpoint) -> None:
        self._tier.pin_locked(entry)
        self._pinned.append(entry)
