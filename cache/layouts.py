"""How each kind of cache leaf is read, cut into pieces of blocks, and filled again.

The only module that knows mlx-lm's and mlx-vlm's cache classes, by name, so that neither has to be imported to keep a
cache. Called on the model's engine thread; the arrays it returns are lazy until the caller evaluates them. Rows are
tokens, on axis -2 of (1, heads, tokens, width) arrays. What is relied on in those classes is pinned by
tests/cache/test_contracts.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from omlxd.cache.errors import CacheInvariantError, UnsupportedLayout

Leaf = Any  # an object of a library's cache class; both libraries are untyped
State = tuple[mx.array | None, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A leaf's rows, in order of position: of the first `sink` tokens, then of tokens [first, stop).

    Row r is token r below `sink`, else token r - sink + first. Arrays may be longer than their rows.
    """

    arrays: tuple[mx.array, ...]
    sink: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Needs:
    """What a leaf must hold to go on at some position: the first `sink` tokens, and all from `first` on.

    `spare` rows behind them hold nothing yet: the leaf writes its next tokens there instead of copying itself first.
    """

    sink: int
    first: int
    spare: int = 0


class Sliceable(Protocol):
    """A kind of leaf whose state is one row per token."""

    def signature(self, leaf: Leaf) -> str:
        """The leaf's parameters, for the model's identity."""
        ...

    def held(self, leaf: Leaf) -> Held | None:
        """What the leaf holds now; None while it is empty."""
        ...

    def needs(self, leaf: Leaf, position: int) -> Needs: ...

    def fill(self, leaf: Leaf, arrays: Sequence[mx.array], position: int) -> None:
        """Gives a fresh leaf exactly the rows it `needs` at `position`. It may replace them, never write into them."""
        ...


class Full:
    """Keys and values of every token: full attention, MLA latents."""

    def signature(self, leaf: Leaf) -> str:
        return "full"

    def held(self, leaf: Leaf) -> Held | None:
        return None if leaf.keys is None else Held((leaf.keys, leaf.values), 0, 0, leaf.offset)

    def needs(self, leaf: Leaf, position: int) -> Needs:
        return Needs(0, 0)

    def fill(self, leaf: Leaf, arrays: Sequence[mx.array], position: int) -> None:
        leaf.keys, leaf.values = arrays
        leaf.offset = position


class Growing(Full):
    """Full attention that is kept in arrays longer than what they hold."""

    def needs(self, leaf: Leaf, position: int) -> Needs:
        return Needs(0, 0, spare=leaf.step - position % leaf.step)


class Quantized(Full):
    """Full attention with packed keys and values: each is (words, scales, biases)."""

    def signature(self, leaf: Leaf) -> str:
        return f"quantized {leaf.bits} bits, groups of {leaf.group_size}"

    def held(self, leaf: Leaf) -> Held | None:
        return None if leaf.keys is None else Held((*leaf.keys, *leaf.values), 0, 0, leaf.offset)

    def fill(self, leaf: Leaf, arrays: Sequence[mx.array], position: int) -> None:
        leaf.keys, leaf.values = tuple(arrays[:3]), tuple(arrays[3:])
        leaf.offset = position


class Chunked(Full):
    """Attention within chunks of the sequence (Llama 4): rows from `start_position` on, the last `chunk_size` count."""

    def signature(self, leaf: Leaf) -> str:
        return f"chunked {leaf.chunk_size}"

    def held(self, leaf: Leaf) -> Held | None:
        return None if leaf.keys is None else Held((leaf.keys, leaf.values), 0, leaf.start_position, leaf.offset)

    def needs(self, leaf: Leaf, position: int) -> Needs:
        return Needs(0, max(0, position - leaf.chunk_size))

    def fill(self, leaf: Leaf, arrays: Sequence[mx.array], position: int) -> None:
        super().fill(leaf, arrays, position)
        leaf.start_position = position - arrays[0].shape[-2]


class Window:
    """Sliding-window attention: a ring of the last `max_size` tokens, of which the first `keep` never leave.

    Right after a chunk of S tokens the ring is unrolled and holds S more rows than a window less one.
    """

    def signature(self, leaf: Leaf) -> str:
        return f"window {leaf.max_size} keep {leaf.keep}"

    def held(self, leaf: Leaf) -> Held | None:
        if leaf.keys is None:
            return None
        keep, offset, index = leaf.keep, leaf.offset, self._index(leaf)
        keys, values = (_unrolled(x, keep, offset, index) for x in (leaf.keys, leaf.values))
        rows = keys.shape[-2]
        if rows == offset:
            return Held((keys, values), 0, 0, offset)
        sink = min(keep, rows)
        return Held((keys, values), sink, offset - (rows - sink), offset)

    def needs(self, leaf: Leaf, position: int) -> Needs:
        if position <= leaf.max_size:
            return Needs(0, 0)
        return Needs(leaf.keep, position - (leaf.max_size - leaf.keep))

    def fill(self, leaf: Leaf, arrays: Sequence[mx.array], position: int) -> None:
        keys, values = arrays
        leaf.state = (keys, values, position, leaf.keep, leaf.max_size, keys.shape[-2])

    def _index(self, leaf: Leaf) -> int:
        return int(leaf.state[5])


class VlmWindow(Window):
    """mlx-vlm's ring: the same behaviour, its numbers in `meta_state` as strings."""

    def fill(self, leaf: Leaf, arrays: Sequence[mx.array], position: int) -> None:
        keys, values = arrays
        leaf.state = (keys, values)
        leaf.meta_state = (leaf.keep, leaf.max_size, position, keys.shape[-2])

    def _index(self, leaf: Leaf) -> int:
        return int(leaf.meta_state[3])


def _unrolled(x: mx.array, keep: int, offset: int, index: int) -> mx.array:
    """A ring's rows in order of position; `index` is where the next row would be written."""
    if index == x.shape[-2]:
        return x
    if index < offset:
        return mx.concatenate([x[..., :keep, :], x[..., index:, :], x[..., keep:index, :]], axis=-2)
    return x[..., :index, :]


class Recurrent:
    """State that sums up all tokens so far, in any number of slots. It cannot be cut, only kept at a position."""

    def signature(self, leaf: Leaf) -> str:
        return f"recurrent {len(leaf.cache)} slots"

    def checkpoint(self, leaf: Leaf) -> State:
        return tuple(None if slot is None else mx.contiguous(slot) for slot in leaf.cache)

    def restore(self, leaf: Leaf, state: State) -> None:
        for index, slot in enumerate(state):
            # A handle of our own: writing into a slice of an array would otherwise show in the stored one.
            leaf[index] = None if slot is None else mx.contiguous(slot)


LAYOUTS: Mapping[str, Sliceable | Recurrent] = {
    "mlx_lm.models.cache.KVCache": Growing(),
    "mlx_lm.models.cache.ConcatenateKVCache": Full(),
    "mlx_lm.models.cache.QuantizedKVCache": Quantized(),
    "mlx_lm.models.cache.ChunkedKVCache": Chunked(),
    "mlx_lm.models.cache.RotatingKVCache": Window(),
    "mlx_lm.models.cache.ArraysCache": Recurrent(),
    "mlx_vlm.models.cache.KVCache": Full(),
    "mlx_vlm.models.cache.ConcatenateKVCache": Full(),
    "mlx_vlm.models.cache.QuantizedKVCache": Quantized(),
    "mlx_vlm.models.cache.ChunkedKVCache": Chunked(),
    "mlx_vlm.models.cache.RotatingKVCache": VlmWindow(),
    "mlx_vlm.models.cache.ArraysCache": Recurrent(),
}
COMPOSITES = frozenset({"mlx_lm.models.cache.CacheList", "mlx_vlm.models.cache.CacheList"})


def class_name(leaf: Leaf) -> str:
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"


def layout_for(leaf: Leaf) -> Sliceable | Recurrent:
    """Raises UnsupportedLayout for a class that the table does not name; a subclass is another class."""
    try:
        return LAYOUTS[class_name(leaf)]
    except KeyError:
        raise UnsupportedLayout(class_name(leaf)) from None


def leaves(caches: Sequence[Leaf]) -> Iterator[Leaf]:
    """A model's leaves in order: composites opened at any depth, layers without a cache left out."""
    for cache in caches:
        if class_name(cache) in COMPOSITES:
            yield from leaves(cache.caches)
        elif cache is not None:
            yield cache


class ModelLayout:
    """A model's whole cache list: which leaf is of which kind. Made once, from the model's own empty caches.

    Holds no reference to the model: fresh caches are copies of the empty ones.
    """

    def __init__(self, empty: Sequence[Leaf]) -> None:
        """Raises UnsupportedLayout naming the first class that is not known."""
        self._empty = copy.deepcopy(list(empty))
        kinds = [(leaf, layout_for(leaf)) for leaf in leaves(self._empty)]
        self.kinds: list[Sliceable | Recurrent] = [kind for _, kind in kinds]
        self.sliceable: list[tuple[int, Sliceable, Leaf]] = [
            (index, kind, leaf) for index, (leaf, kind) in enumerate(kinds) if not isinstance(kind, Recurrent)
        ]
        self.recurrent: list[tuple[int, Recurrent]] = [
            (index, kind) for index, (_, kind) in enumerate(kinds) if isinstance(kind, Recurrent)
        ]
        self.signature = "; ".join(kind.signature(leaf) for leaf, kind in kinds)

    def fresh(self) -> list[Leaf]:
        """Empty caches as the model would make them, owned by the caller."""
        return copy.deepcopy(self._empty)

    def held(self, caches: Sequence[Leaf], position: int) -> list[Held]:
        """What each sliceable leaf holds. Raises CacheInvariantError if one has not come as far as `position`."""
        flat = list(leaves(caches))
        found = [(index, kind.held(flat[index])) for index, kind, _ in self.sliceable]
        for index, held in found:
            if held is None or held.stop < position:
                reached = 0 if held is None else held.stop
                raise CacheInvariantError(f"leaf {index} holds {reached} tokens, {position} were to be published")
        return [held for _, held in found if held is not None]

    def needs(self, position: int) -> list[Needs]:
        """What each sliceable leaf must be given to go on at `position`."""
        return [kind.needs(leaf, position) for _, kind, leaf in self.sliceable]

    @property
    def window(self) -> int | None:
        """How many of the last tokens the most forgetful leaf keeps; None when all are kept."""
        far = 1 << 40
        return min((far - needs.first for needs in self.needs(far) if needs.first), default=None)

    def checkpoint(self, caches: Sequence[Leaf]) -> list[State]:
        flat = list(leaves(caches))
        return [kind.checkpoint(flat[index]) for index, kind in self.recurrent]

    def fill(
        self, caches: Sequence[Leaf], rows: Sequence[Sequence[mx.array]], states: Sequence[State], position: int
    ) -> None:
        """Turns fresh caches into ones that stand at `position`."""
        flat = list(leaves(caches))
        for (index, kind, _), arrays in zip(self.sliceable, rows, strict=True):
            kind.fill(flat[index], arrays, position)
        for (index, recurrent), state in zip(self.recurrent, states, strict=True):
            recurrent.restore(flat[index], state)
