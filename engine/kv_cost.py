"""What a model's cache costs, read off the model itself: a pass that is never computed shows every array's shape.

Called once per load, on the loader thread. Running a model in MLX only builds a graph, so the caches' arrays have
shapes and data types before a byte of them exists; that holds for every layout, quantised and latent ones included,
and needs no formula per architecture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from omlxd.cache.errors import UnsupportedLayout
from omlxd.cache.layouts import Leaf, Recurrent, Sliceable, layout_for, leaves
from omlxd.engine.estimator import Costs, KvCost, LeafCost
from omlxd.engine.model import LoadedModel
from omlxd.engine.prefill import new_caches
from omlxd.engine.widths import widths

_TOKENS = 8  # of the pass that is not computed; more than one, so that it is a prompt's and not a row's
_FAR = 1 << 40


def costs_of(loaded: LoadedModel) -> Costs:
    """What the loaded model's work costs, by its caches and by the config in its folder."""
    config = json.loads((loaded.facts.path / "config.json").read_bytes())
    gpu = mx.default_device() == mx.Device(mx.gpu)
    vocabulary, each = loaded.facts.vocab_size, item_bytes(loaded.model)
    return Costs(kv_cost(loaded.model), widths(config, vocabulary=vocabulary, item_bytes=each, gpu=gpu))


def kv_cost(model: Module) -> KvCost:
    """The model's cache, leaf by leaf. Computes and allocates nothing."""
    short, long = _caches_after(model, _TOKENS), _caches_after(model, 2 * _TOKENS)
    pairs = zip(leaves(short), leaves(long), strict=True)
    return KvCost(tuple(_leaf_cost(leaf, longer) for leaf, longer in pairs))


def item_bytes(model: Module) -> int:
    """Of the model's activations: the widest of what its caches keep unpacked, 2 if they say nothing."""
    return max((_item_bytes(leaf) for leaf in leaves(_caches_after(model, _TOKENS))), default=0) or 2


def _caches_after(model: Module, num_tokens: int) -> list[Any]:
    caches = new_caches(model)
    model(mx.zeros((1, num_tokens), dtype=mx.int32), cache=caches)
    return caches


def _leaf_cost(leaf: Leaf, longer: Leaf) -> LeafCost:
    try:
        kind = layout_for(leaf)
    except UnsupportedLayout:
        # Not one that prompts are kept of: what it says itself, at two lengths.
        return LeafCost(max(0, longer.nbytes - leaf.nbytes) // _TOKENS, None, leaf.nbytes)
    return LeafCost(fixed_bytes=leaf.nbytes) if isinstance(kind, Recurrent) else _sliceable(kind, leaf)


def _sliceable(kind: Sliceable, leaf: Leaf) -> LeafCost:
    held = kind.held(leaf)
    if held is None:
        return LeafCost()
    needs = kind.needs(leaf, _FAR)
    window = needs.sink + _FAR - needs.first if needs.first else None
    return LeafCost(_row_bytes(held.arrays), window)


def _row_bytes(arrays: Sequence[mx.array]) -> int:
    """Of (1, heads, rows, width) arrays."""
    return sum(array.nbytes // array.shape[-2] for array in arrays)


def _item_bytes(leaf: Leaf) -> int:
    try:
        kind = layout_for(leaf)
    except UnsupportedLayout:
        return 0
    floating = [array for array in _arrays(kind, leaf) if mx.issubdtype(array.dtype, mx.floating)]
    return max((array.nbytes // math.prod(array.shape) for array in floating), default=0)


def _arrays(kind: Sliceable | Recurrent, leaf: Leaf) -> Sequence[mx.array]:
    if isinstance(kind, Recurrent):
        return [slot for slot in kind.checkpoint(leaf) if slot is not None]
    held = kind.held(leaf)
    return () if held is None else held.arrays
