"""What pictures cost in memory: the tower's own work, and what it makes of them.

`Tower` is read off a model's config at load, on the large side where a width has many names. `PictureMemory` is one
engine's part of the ledger for what is made of pictures, on the engine thread; a request's bytes are there from its
admission on. What the tower is given has an entry of its own, from its making on: see `picture_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import mlx.core as mx

from omlxd.engine.estimator import Correction
from omlxd.engine.ledger import Ledger, Reservation
from omlxd.engine.vision_inputs import GRID, PIXELS, PictureInput

_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision tower's widths; `out` is that of the embeddings it makes, `patch` a patch's side in pixels."""

    hidden: int
    intermediate: int
    heads: int
    depth: int
    patch: int
    out: int
    item_bytes: int
    fused: bool

    def seeing(self, picture: PictureInput) -> int:
        """The transient of seeing one picture: its pixels, every layer's stream, one layer's work and its scores."""
        tiles, patches = self._patches(picture)
        each = (self.depth + 8) * self.hidden + 3 * self.intermediate
        scores = 0 if self.fused else 2 * self.heads * patches
        return picture.nbytes + tiles * patches * (each + scores) * self.item_bytes

    def embeddings(self, picture: PictureInput) -> int:
        """What comes of it."""
        return (picture.span.stop - picture.span.start) * self.out * self.item_bytes

    def _patches(self, picture: PictureInput) -> tuple[int, int]:
        """Tiles that are seen apart, and patches of each."""
        shape = picture.tensors[PIXELS].shape
        if GRID in picture.tensors:
            return 1, shape[0]
        return prod(shape[:-3]), prod(shape[-3:]) // (_CHANNELS * self.patch**2)


def tower_of(config: Mapping[str, Any], *, out: int, item_bytes: int, gpu: bool) -> Tower:
    """The tower that a model's config describes. MLX's attention writes no scores out on a GPU."""
    vision = config.get("vision_config")
    widths: Mapping[str, Any] = vision if isinstance(vision, Mapping) else {}

    def width(names: Sequence[str], otherwise: int) -> int:
        found = [widths[name] for name in names if isinstance(widths.get(name), int)]
        return max([n for n in found if n > 0], default=otherwise)

    hidden = width(("hidden_size", "embed_dim", "width"), 1024)
    return Tower(
        hidden=hidden,
        intermediate=width(("intermediate_size",), 4 * hidden),
        heads=width(("num_attention_heads", "num_heads"), max(1, hidden // 64)),
        depth=width(("num_hidden_layers", "depth", "layers"), 32),
        patch=width(("patch_size",), 14),
        out=out,
        item_bytes=item_bytes,
        fused=gpu,
    )


class Features(Protocol):
    """What is kept of pictures that have been seen; `vision_prefill.FeatureCache` is it."""

    nbytes: int

    def report_to(self, resized: Callable[[int], object]) -> None: ...

    def shrink(self, nbytes: int) -> None: ...


class PictureMemory:
    """The bytes of one engine's pictures. Without a tower there are none."""

    def __init__(
        self,
        name: str,
        ledger: Ledger,
        tower: Tower | None,
        features: Features | None = None,
        short: Callable[[], object] = lambda: None,
    ) -> None:
        """`features` are what is kept of pictures that have been seen; `short` has others let go of theirs, soon."""
        self._short = short
        self._name = name
        self._features = features
        self._ledger = ledger
        self._tower = tower
        self._held: dict[str, Reservation] = {}
        self._kept: Reservation | None = None if tower is None else ledger.hold(name, "pictures", 0)
        self._correction = Correction()
        if features is not None:
            features.report_to(self._keep)

    def waiting(self, pictures: Sequence[PictureInput]) -> int:
        """Of a request's pictures, from its admission to its end: what the tower makes of them."""
        if self._tower is None:
            return 0
        return sum(map(self._tower.embeddings, pictures))

    def most(self, pictures: Sequence[PictureInput]) -> int:
        """The most that they can take at once beside their tensors."""
        return self.waiting(pictures) + max(map(self._seeing, pictures), default=0)

    def take(self, id: str, pictures: Sequence[PictureInput]) -> None:
        """A request with these begins; there was room for them."""
        if pictures and id not in self._held:
            self._held[id] = self._ledger.hold(self._name, "pictures", self.waiting(pictures))

    def leave(self, id: str) -> None:
        held = self._held.pop(id, None)
        if held is not None:
            held.release()

    def make_room(self) -> bool:
        """Memory is short: lets go of what is kept for pictures that may come again. False if nothing goes at once."""
        self._short()
        if self._features is None or not self._features.nbytes:
            return False
        self._features.shrink(0)
        return True

    def _keep(self, nbytes: int) -> None:
        if self._kept is not None:
            self._kept.resize(nbytes)

    def close(self) -> None:
        """Everything has been dropped."""
        for held in [*self._held.values(), *([] if self._kept is None else [self._kept])]:
            held.release()
        self._held.clear()

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._held.values()) + (0 if self._kept is None else self._kept.nbytes)

    @contextmanager
    def seeing(self, picture: PictureInput) -> Iterator[None]:
        """Holds the tower's transient while a picture is seen, and learns from what it took."""
        work = self._ledger.hold(self._name, "chunk", self._seeing(picture))
        mx.reset_peak_memory()
        try:
            yield
            if self._tower is not None:
                self._correction.took(mx.get_peak_memory() - mx.get_active_memory(), self._tower.seeing(picture))
        finally:
            work.release()

    def _seeing(self, picture: PictureInput) -> int:
        return 0 if self._tower is None else self._correction.of(self._tower.seeing(picture))
