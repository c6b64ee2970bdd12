"""The prefix tree: which blocks and checkpoints are stored, by chain key, and how far they answer for a prompt.

Owns the nodes of one model's cache. It has no lock of its own: whoever calls it holds the hot tier's, see hot.py. Knows
keys, token bytes and pieces' shapes; computes with no arrays. A node's children continue it; a partial block (fewer
tokens than the block size) is never continued, and goes when a longer block that starts with it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from omlxd.cache.children import Children
from omlxd.cache.entries import Block, Checkpoint, Match, block_nbytes
from omlxd.cache.errors import CacheInvariantError
from omlxd.cache.hot import HotTier
from omlxd.cache.keys import BlockSpec, MediaSpan, shared
from omlxd.cache.layouts import Needs, State
from omlxd.cache.pieces import Piece, conflict

# How many of the most alike blocks are asked whether a new one makes them superfluous; any others are left to eviction.
NEAREST = 8


class PrefixTree:
    """One model's blocks. `needs` says what the model's sliceable leaves need at a position."""

    def __init__(
        self, tier: HotTier, block_size: int, *, needs: Callable[[int], Sequence[Needs]], recurrent: bool
    ) -> None:
        self._tier = tier
        self._block_size = block_size
        self._needs = needs
        self._recurrent = recurrent
        self.closed = False  # nothing may be linked any more
        self._added = self._removed = 0  # entries, by this tree; whatever else is missing was evicted
        self._first: Children[Block] = Children()

    # -- matching -----------------------------------------------------------------------------------------------------

    def path(self, specs: Sequence[BlockSpec]) -> list[Block]:
        """The stored blocks whose keys are the prompt's, from its first token on."""
        found: list[Block] = []
        siblings = self._first
        for spec in specs:
            block = siblings.get(spec.key)
            if block is None:
                break
            found.append(block)
            siblings = block.children
        return found

    def match(self, specs: Sequence[BlockSpec], media: Sequence[MediaSpan], limit: int) -> Match:
        """The longest usable prefix of at most `limit` tokens. Touches what it returns."""
        path = self.path(specs)
        find = self._match_checkpoint if self._recurrent else self._match_tokens
        best = find(specs, media, path, limit)
        for entry in best.blocks:
            self._tier.touch_locked(entry)
        if best.checkpoint:
            self._tier.touch_locked(best.checkpoint)
        return best

    def reach(self, specs: Sequence[BlockSpec]) -> tuple[int, Block | None]:
        """How many of the prompt's tokens are stored at all, usable or not, and the block in which they end."""
        path = self.path(specs)
        block, run = next(self._runs(specs, path), (None, 0))
        if block is not None:
            return block.spec.start + run, block
        return (path[-1].spec.stop, path[-1]) if path else (0, None)

    def _runs(self, specs: Sequence[BlockSpec], path: Sequence[Block]) -> Iterator[tuple[Block, int]]:
        """The blocks that follow `path` and share some tokens with the prompt, and how many."""
        if len(path) < len(specs):
            yield from self._children(path).alike(specs[len(path)])

    def _children(self, path: Sequence[Block]) -> Children[Block]:
        return path[-1].children if path else self._first

    def _match_tokens(
        self, specs: Sequence[BlockSpec], media: Sequence[MediaSpan], path: list[Block], limit: int
    ) -> Match:
        """The stored path, and of what follows it the block that leads furthest."""
        stop = path[-1].spec.stop if path else 0
        best = _cover(path, self._usable(path, media, min(stop, limit)))
        for block, run in self._runs(specs, path):
            position = self._usable([*path, block], media, min(stop + run, limit))
            if position > best.position:
                best = _cover([*path, block], position)
            if not block.gaps:
                break  # the next ones share no more
        return best

    def _match_checkpoint(
        self, specs: Sequence[BlockSpec], media: Sequence[MediaSpan], path: list[Block], limit: int
    ) -> Match:
        """From the deepest level up: the last checkpoint that lies in a block's run shared with the prompt."""
        best = Match()
        for depth in range(min(len(path), len(specs) - 1), -1, -1):
            for block, run in self._runs(specs, path[:depth]):
                stop = min(limit, block.spec.start + run)
                if stop <= best.position:
                    break  # the next ones share no more
                blocks = [*path[:depth], block]
                usable = [p for p in block.checkpoints if p <= stop and self._usable(blocks, media, p) == p]
                position = max(usable, default=0)
                if position > best.position:
                    best = Match(tuple(blocks), position, block.checkpoints[position])
            if best.position:
                break
        return best

    def _usable(self, blocks: Sequence[Block], media: Sequence[MediaSpan], position: int) -> int:
        """The largest position <= `position` that is in no picture and for which no leaf lacks a row it needs."""
        gaps = [gap for block in blocks for gap in block.gaps]
        while True:
            inside = [span.start for span in media if span.start < position < span.stop]
            needs = self._needs(position) if gaps else ()
            short = [gap.start for index, gap in gaps if conflict(gap, needs[index], position)]
            if not inside and not short:
                return position
            position = min(inside + short)

    # -- storing ------------------------------------------------------------------------------------------------------

    def covering(self, path: Sequence[Block], spec: BlockSpec) -> Block | None:
        """A block after `path` that starts with all tokens of `spec`: the same block or a longer one."""
        children = self._children(path)
        same = children.get(spec.key)
        if same is not None or spec.num_tokens == self._block_size:
            return same
        longer: Block | None = None
        for block, run in children.alike(spec):
            if run < spec.num_tokens:
                break
            longer = block
            if not block.gaps:
                break
        return longer

    def donor(self, path: Sequence[Block], spec: BlockSpec) -> tuple[Block, int] | None:
        """The block after `path` that shares the most first tokens with `spec`, and how many."""
        return next(self._children(path).alike(spec), None)

    def link(self, path: Sequence[Block], spec: BlockSpec, pieces: Sequence[Piece]) -> Block:
        """Stores a block after `path`. Room for its bytes has been made; partial blocks that it contains go."""
        siblings = self._children(path)
        parent = path[-1] if path else None
        block = Block(spec, parent, siblings)
        block.set_pieces(pieces)
        siblings.add(block)
        self._tier.add_locked(block)
        self._added += 1
        for other, _ in list(islice(siblings.alike(spec), NEAREST)):
            self._absorb(other, block)
        return block

    def replace(self, block: Block, pieces: Sequence[Piece]) -> None:
        """Gives a block pieces with fewer gaps."""
        before = block.nbytes
        block.set_pieces(pieces)
        self._tier.resized_locked(block, before)

    def attach(self, block: Block, spec: BlockSpec, states: Sequence[State], nbytes: int) -> Checkpoint:
        """Stores the state after the tokens of `spec` in the block that starts with them. Room has been made."""
        checkpoint = Checkpoint(block, spec.stop, states, nbytes)
        block.checkpoints[spec.stop] = checkpoint
        self._tier.add_locked(checkpoint)
        self._added += 1
        return checkpoint

    def tidy(self, block: Block) -> None:
        """Takes a partial block that is no longer used out, if a longer one has come in the meantime."""
        for other, _ in list(islice(block.siblings.alike(block.spec), NEAREST)) if block.alive else []:
            self._absorb(block, other)

    def _absorb(self, partial: Block, longer: Block) -> None:
        """Takes `partial` out if nobody uses it and `longer` has all of it; its checkpoints move there."""
        spec = partial.spec
        if not partial.alive or spec.num_tokens >= min(self._block_size, longer.spec.num_tokens):
            return
        used = partial.pins or any(checkpoint.pins for checkpoint in partial.checkpoints.values())
        if used or longer.gaps or shared(longer.spec, spec.tokens, spec.spans) < spec.num_tokens:
            return
        self._move_checkpoints(partial, longer)
        self._remove(partial)

    def _move_checkpoints(self, block: Block, other: Block) -> None:
        for position, checkpoint in list(block.checkpoints.items()):
            if position in other.checkpoints:
                self._remove(checkpoint)
            else:
                del block.checkpoints[position]
                checkpoint.block = other
                other.checkpoints[position] = checkpoint

    # -- all of it ----------------------------------------------------------------------------------------------------

    def blocks(self) -> Iterator[Block]:
        """Every block, parents before children."""
        stack = list(self._first)
        while stack:
            block = stack.pop()
            yield block
            stack.extend(block.children)

    def entries(self) -> list[Block | Checkpoint]:
        """Everything stored, what hangs on something before it."""
        found: list[Block | Checkpoint] = []
        for block in self.blocks():
            found.append(block)
            found.extend(block.checkpoints.values())
        return found[::-1]

    def clear(self) -> list[Block | Checkpoint]:
        """Takes everything out, pinned or not, and returns it, for its arrays to be dropped after the lock."""
        gone = self.entries()
        for entry in gone:
            self._remove(entry)
        return gone

    def evicted(self) -> int:
        """How many entries the tier has taken out to make room."""
        return self._added - self._removed - len(self.entries())

    def _remove(self, entry: Block | Checkpoint) -> None:
        self._removed += entry.alive
        self._tier.remove_locked(entry)

    def check(self) -> None:
        """Raises CacheInvariantError unless every block has its parent and every entry its bytes."""
        for block in self.blocks():
            parent_stop = block.parent.spec.stop if block.parent else 0
            if not block.alive or block.siblings.get(block.spec.key) is not block:
                raise CacheInvariantError(f"block at {block.spec.start} is reachable and not stored")
            if block.parent is not None and not block.parent.alive:
                raise CacheInvariantError(f"block at {block.spec.start} has lost its parent")
            if block.spec.start != parent_stop or (block.spec.start % self._block_size):
                raise CacheInvariantError(f"block at {block.spec.start} follows one that ends at {parent_stop}")
            if block.nbytes != block_nbytes(block.spec, block.pieces):
                raise CacheInvariantError(f"block at {block.spec.start} is counted as {block.nbytes} bytes")
            for position, checkpoint in block.checkpoints.items():
                inside = block.spec.start < position <= block.spec.stop
                if not (inside and checkpoint.alive and checkpoint.block is block and checkpoint.position == position):
                    raise CacheInvariantError(f"checkpoint at {position} is not where it belongs")


def _cover(blocks: Sequence[Block], position: int) -> Match:
    return Match(tuple(block for block in blocks if block.spec.start < position), position)
