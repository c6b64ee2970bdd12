"""Prefill: running a prompt through the model ahead of decoding. The only place that calls the model on a prompt.

`Prefill` is one prompt on caches of its own, computed in turns whose size the scheduler chooses. Short prompts need no
turns of their own: they join the batch together (`Batch.join`), padded to each other. Used on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from omlxd.engine.rate import PrefillRate

if TYPE_CHECKING:
    from omlxd.engine.vision_inputs import PictureInput

Caches = list[Any]
# What running a vision tower raises over a picture that it cannot take: mlx's own errors, and Python's over its shapes.
TOWER_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class Unseen:
    """A picture whose tokens come next and of which nothing is known yet. `see` runs the vision tower, and waits."""

    picture: PictureInput
    see: Callable[[], None]


class Prefill:
    """One prompt's way into its caches. The last token is never run here: its logits belong to the first draw."""

    def __init__(self, model: Module, tokens: Sequence[int], caches: Caches, done: int = 0) -> None:
        """`caches` hold the KV of the first `done` tokens."""
        self._model = model
        self._tokens = tokens
        self.caches = caches
        self.done = done
        self.rate = PrefillRate()  # its own: a long context makes every further token dearer

    @property
    def remaining(self) -> int:
        """Tokens to run before the last one."""
        return len(self._tokens) - 1 - self.done

    @property
    def kv_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    @property
    def rest(self) -> Sequence[int]:
        """What has not been run yet, the last token included."""
        return self._tokens[self.done :]

    @property
    def has_pictures(self) -> bool:
        """Whether some of what has not been run stands for pictures: then it is run here and nowhere else."""
        return False

    def unseen(self, num_tokens: int) -> Unseen | None:
        """The picture that must be seen before the next `num_tokens` can be run, if one must."""
        return None

    def advance(self, num_tokens: int) -> None:
        """Runs at most `num_tokens` more and waits for them: how long a turn took is what sizes the next."""
        stop = self.done + min(num_tokens, self.remaining)
        # The logits stay lazy and are never computed: only the caches are evaluated.
        self._model(mx.array(list(self._tokens[self.done : stop]))[None], cache=self.caches)
        mx.eval([cache.state for cache in self.caches])
        self.done = stop


def new_caches(model: Module) -> Caches:
    """Empty caches for one row, as the model wants them."""
    return list(make_prompt_cache(model))


def weight_bytes(model: Module) -> int:
    """What a pass through all of the model reads."""
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))  # type: ignore[no-untyped-call]
    return sum(array.nbytes for _, array in weights)


def mergeable(caches: Caches) -> bool:
    """Whether rows with such caches can share one batch.

    mlx-lm 0.32.2 merges these classes; its merged rotating cache has no place for tokens that are kept for ever.
    """
    return all(_mergeable(cache) for cache in caches)


def _mergeable(cache: Any) -> bool:
    if type(cache) is CacheList:
        return all(_mergeable(leaf) for leaf in cache.caches)
    if type(cache) is RotatingKVCache:
        return bool(cache.keep == 0)
    return type(cache) in (KVCache, ArraysCache)
