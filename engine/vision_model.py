"""A vision model as the engine runs it: mlx-vlm's parts behind the call that a batch makes.

`VisionModel` is built on the loader thread and owned by one engine thread. It holds weights and facts and no request's
state: where a row's positions stand travels with the row, in a leaf of its own beside its caches (`RowShift`), which
the batch merges, filters and extends as it does the others. mlx-vlm's language models would keep the shift of the
latest prompt on themselves if they were left to count positions, so they are always told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx_vlm.models.cache as vlm_cache
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, RotatingKVCache
from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[Any]]
Caches = list[Any]
AXES = 3  # of a position with time, height and width


class RowShift:
    """By how much positions run ahead of the count of tokens after a row's last picture, for each row of a batch.

    Shaped as a cache leaf, so that a batch carries it along with the row; it holds no keys and no values.
    """

    def __init__(self, shifts: Sequence[int] = (0,)) -> None:
        self._shifts = list(shifts)
        self._array: mx.array | None = None

    @property
    def rows(self) -> mx.array:
        """(rows, 1)"""
        if self._array is None:
            self._array = mx.array(self._shifts)[:, None]
        return self._array

    @property
    def state(self) -> tuple[mx.array, ...]:
        return ()  # nothing to evaluate

    @property
    def nbytes(self) -> int:
        return 0

    @classmethod
    def merge(cls, leaves: Sequence[RowShift]) -> RowShift:
        return cls([shift for leaf in leaves for shift in leaf._shifts])

    def extend(self, other: RowShift) -> None:
        self._shifts += other._shifts
        self._array = None

    def filter(self, keep: Sequence[int]) -> None:
        self._shifts = [self._shifts[row] for row in keep]
        self._array = None

    def extract(self, row: int) -> RowShift:
        return RowShift([self._shifts[row]])

    def prepare(self, **padding: object) -> None:
        """Padding moves no position."""

    def finalize(self) -> None:
        """Nor does taking it out again."""


class VisionModel(Module):
    """A model of mlx-vlm's that a batch can call, and that embeds one picture at a time.

    `counts_apart`: its positions are told, because a picture takes fewer of them than it has tokens (mRoPE).
    """

    def __init__(self, vlm: Any, *, counts_apart: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vlm = vlm
        self.counts_apart = counts_apart

    def __call__(
        self,
        tokens: mx.array,
        cache: Caches,
        *,
        embeddings: mx.array | None = None,
        positions: mx.array | None = None,
    ) -> mx.array:
        """Logits (rows, length, vocabulary) for tokens (rows, length) after what the caches hold.

        `embeddings` (rows, length, width) stand in for the tokens' own; `positions` (3, rows, length) for the count.
        """
        language = self.vlm.language_model
        if not self.counts_apart:
            return cast("mx.array", language(tokens, inputs_embeds=embeddings, cache=cache).logits)
        *leaves, last = cache
        shift = last if isinstance(last, RowShift) else RowShift()
        leaves = leaves if isinstance(last, RowShift) else cache
        if positions is None:
            positions = _counted(tokens, leaves[0].offset, shift)
        output = language(tokens, inputs_embeds=embeddings, cache=leaves, position_ids=positions)
        return cast("mx.array", output.logits)

    def make_cache(self) -> Caches:
        """Empty caches for one row, mlx-lm's own classes wherever mlx-vlm's only repeat them."""
        return [_plain(leaf) for leaf in vlm_cache.make_prompt_cache(self.vlm.language_model)]

    def embed_text(self, token_ids: Sequence[int]) -> mx.array:
        """(length, width) of tokens that stand for themselves."""
        features = self.vlm.get_input_embeddings(mx.array(list(token_ids))[None])
        return cast("mx.array", features.inputs_embeds[0])

    def embed_picture(self, token_ids: Sequence[int], tensors: Tensors) -> mx.array:
        """(length, width) of the tokens that stand for one picture, from the first to the last, with its content."""
        return cast("mx.array", self.features(token_ids, tensors).inputs_embeds[0])

    def features(self, token_ids: Sequence[int], tensors: Tensors) -> Any:
        """All that mlx-vlm makes of the tokens that stand for one picture: an `InputEmbeddingsFeatures`."""
        ids = mx.array(list(token_ids))[None]
        arrays = {name: mx.array(tensor) for name, tensor in tensors.items()}
        pixels = arrays.pop("pixel_values")
        return self.vlm.get_input_embeddings(ids, pixels, mask=mx.ones_like(ids), **arrays)

    def positions(self, token_ids: Sequence[int], grids: Sequence[Tensors]) -> tuple[NDArray[np.int32], int]:
        """Every token's position (3, length), and by how much what follows runs ahead of the count of tokens.

        `grids` are the pictures' tensors, in order; all of the prompt's pictures, or of its beginning.
        """
        thw = mx.array(np.concatenate([each["image_grid_thw"] for each in grids]))
        ids = mx.array(list(token_ids))[None]
        positions, shift = self.vlm.language_model.get_rope_index(ids, thw)
        return np.array(positions)[:, 0, :].astype(np.int32), int(shift.item())


def _counted(tokens: mx.array, offset: int | mx.array, shift: RowShift) -> mx.array:
    """Positions (3, rows, length) of tokens none of which stands for a picture."""
    # The place of a row's padding is below zero; what is computed there is never looked at.
    start = mx.maximum(offset, 0).reshape(-1, 1) + shift.rows
    rows, length = tokens.shape
    return mx.broadcast_to(start + mx.arange(length), (AXES, rows, length))


def _plain(leaf: Any) -> Any:
    if type(leaf) is vlm_cache.KVCache:
        return KVCache()
    if type(leaf) is vlm_cache.RotatingKVCache:
        return RotatingKVCache(leaf.max_size, leaf.keep)
    return leaf
