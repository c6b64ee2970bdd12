"""What a vision model is given: a rendered conversation's token ids, and each picture's tensors with its tokens.

What it hands on is numpy, so that no `mx.array` leaves the thread that made it. The processor is mlx-vlm's or
transformers' own. Where what it writes for a picture depends on nothing but the picture, it is given each one alone, on
a thread of its own, and what it makes serves every prompt that shows the picture; the text around it is tokenized with
that written in, on the tokenizer thread. Else the processor belongs to the tokenizer thread and sees whole prompts;
which tokens then belong to which picture, and which rows of the tensors, is what a `Share` knows. What holds of a model
is found out once, when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from omlxd.cache.keys import MediaSpan
from omlxd.engine.api import InvalidParams

if TYPE_CHECKING:
    from PIL.Image import Image

    from omlxd.engine.images import Picture
    from omlxd.engine.picture_memory import Tower

Tensors = Mapping[str, NDArray[Any]]
Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str, bool], list[int]]
PIXELS, GRID = "pixel_values", "image_grid_thw"
_OF_THE_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
# What processors raise over pictures that they cannot take (too flat, too small) and texts that do not fit them.
PROCESSOR_FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_NOT_ONCE = "the model's chat template does not show every picture once"


@dataclass(frozen=True, slots=True)
class PictureInput:
    """One picture of a prompt: which tokens stand for it, and what the vision tower is given."""

    span: MediaSpan
    tensors: Tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Apart:
    """A picture as its processor gives it alone: what stands for it in a prompt, in how many tokens of its own."""

    text: str
    num_tokens: int
    tensors: Tensors

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Processed:
    """A processor's answer: the ids of the whole text, and the pictures' tensors as it lays them out."""

    token_ids: list[int]
    tensors: Tensors


class Processor(Protocol):
    """A processor of one model; `processed` calls it."""

    def __call__(self, *, text: list[str], images: list[Image]) -> Mapping[str, Any]: ...


def processed(processor: Processor, text: str, images: Sequence[Image]) -> Processed:
    """Raises one of PROCESSOR_FAILURES."""
    features = processor(text=[text], images=list(images))
    tensors = {name: np.array(value) for name, value in features.items() if name not in _OF_THE_TEXT}
    return Processed([int(token) for token in np.array(features["input_ids"]).reshape(-1)], tensors)


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except PROCESSOR_FAILURES as exc:
        raise InvalidParams("messages", f"the model's processor refused its pictures: {exc}") from None


class Share(Protocol):
    """How the tensors of several pictures are told apart."""

    def split(self, whole: Processed, images: Sequence[Image]) -> list[Tensors]:
        """Each picture's own tensors, as the processor would give them for it alone."""
        ...

    def tokens(self, shares: Sequence[Tensors], total: int) -> list[int]:
        """How many of the `total` picture tokens each picture has."""
        ...


class ByPicture:
    """Pictures of one size: the first axis of every tensor counts them."""

    def split(self, whole: Processed, images: Sequence[Image]) -> list[Tensors]:
        return [{name: x[n : n + 1] for name, x in whole.tensors.items()} for n in range(len(images))]

    def tokens(self, shares: Sequence[Tensors], total: int) -> list[int]:
        return [total // len(shares)] * len(shares)


class ByGrid:
    """Pictures cut into a grid of patches each, one row of pixels per patch (Qwen's families)."""

    def split(self, whole: Processed, images: Sequence[Image]) -> list[Tensors]:
        grids, pixels = whole.tensors[GRID], whole.tensors[PIXELS]
        stops = np.cumsum(grids.prod(axis=-1)).tolist()
        starts = [0, *stops[:-1]]
        return [
            {PIXELS: pixels[start:stop], GRID: grids[n : n + 1]}
            for n, (start, stop) in enumerate(zip(starts, stops, strict=True))
        ]

    def tokens(self, shares: Sequence[Tensors], total: int) -> list[int]:
        patches = [int(share[GRID].prod()) for share in shares]
        return [total * each // sum(patches) for each in patches]


class ByTiles:
    """Pictures cut into a number of tiles each, all on the second axis: only the processor knows how many."""

    def __init__(self, processor: Processor, probe: str) -> None:
        """`probe` is a text with one picture."""
        self._processor = processor
        self._probe = probe

    def split(self, whole: Processed, images: Sequence[Image]) -> list[Tensors]:
        if len(images) == 1:
            return [whole.tensors]
        return [processed(self._processor, self._probe, [image]).tensors for image in images]

    def tokens(self, shares: Sequence[Tensors], total: int) -> list[int]:
        tiles = [share[PIXELS].shape[1] for share in shares]
        return [total * each // sum(tiles) for each in tiles]


@dataclass(frozen=True, slots=True)
class Sight:
    """How a loaded vision model is given pictures. The processor belongs to one thread from then on.

    `token_id` is the token that is repeated for a picture; `marks` are the texts that may not be in a client's own.
    `mark` is what a template writes for a picture that can be processed alone, None where pictures cannot; `decode` is
    the processor's tokenizer's.
    """

    processor: Processor
    share: Share
    token_id: int
    marks: Sequence[str]
    tower: Tower
    decode: Decode
    mark: str | None = None
    bos: str | None = None
    bos_id: int | None = None

    def apart(self, picture: Picture) -> Apart:
        """A picture processed alone, on the processor's thread, where there is a `mark`. Raises InvalidParams."""
        with _refusing():
            alone = processed(self.processor, self.mark or "", [picture.image])
        ids = alone.token_ids[1:] if alone.token_ids[:1] == [self.bos_id] else alone.token_ids
        # Blanks at its edges are those that some tokenizers put before a text's first word.
        return Apart(self.decode(ids).strip(" "), ids.count(self.token_id), alone.tensors)

    def prompt(
        self, text: str, pictures: Sequence[Picture], apart: Mapping[bytes, Apart], encode: Encode
    ) -> tuple[list[int], list[PictureInput]]:
        """The ids of a rendered conversation that shows these pictures, in order, and each one's tensors.

        `apart` has them by their digests, where there is a `mark`; `encode` is the tokenizer's, told whether to begin
        the text. Raises InvalidParams.
        """
        digests = [picture.digest for picture in pictures]
        if self.mark is None:
            ids, tensors, counts = self._together(text, [picture.image for picture in pictures])
        else:
            shown = [apart[digest] for digest in digests]
            ids = encode(self._written(text, self.mark, shown), self.begins(text))
            tensors, counts = [each.tensors for each in shown], [each.num_tokens for each in shown]
        return ids, [
            PictureInput(MediaSpan(start, stop, digest), each)
            for (start, stop), digest, each in zip(self._spans(ids, counts), digests, tensors, strict=True)
        ]

    def _written(self, text: str, mark: str, shown: Sequence[Apart]) -> str:
        first, *others = text.split(mark)
        if len(others) != len(shown):
            raise InvalidParams("messages", _NOT_ONCE)
        return first + "".join(each.text + other for each, other in zip(shown, others, strict=True))

    def _together(self, text: str, images: Sequence[Image]) -> tuple[list[int], list[Tensors], list[int]]:
        with _refusing():
            whole = processed(self.processor, text, images)
            shares = self.share.split(whole, images)
        ids = self._without_second_bos(whole.token_ids, text)
        return ids, shares, self.share.tokens(shares, ids.count(self.token_id))

    def begins(self, text: str) -> bool:
        """Whether a rendered conversation is still to be given the tokens that every text begins with."""
        return self.bos is None or not text.startswith(self.bos)

    def check_text(self, texts: Sequence[str]) -> None:
        """Raises InvalidParams for a client's text that would be taken for a picture."""
        found = next((mark for mark in self.marks for text in texts if mark in text), None)
        if found is not None:
            raise InvalidParams("messages", f"a text has {found!r} in it, the mark of a picture; send an image part")

    def _without_second_bos(self, ids: list[int], text: str) -> list[int]:
        # Processors begin every text with the BOS token, one that a template has begun with it too.
        return ids[1:] if not self.begins(text) and ids[:2] == [self.bos_id, self.bos_id] else ids

    def _spans(self, ids: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
        """From each picture's first token to behind its last."""
        places = [place for place, token in enumerate(ids) if token == self.token_id]
        if sum(counts) != len(places) or not all(counts):
            raise InvalidParams("messages", _NOT_ONCE)
        if places and places[-1] == len(ids) - 1:
            raise InvalidParams("messages", "end with a picture; put a text after it")
        stops = np.cumsum(counts).tolist()
        return [(places[stop - count], places[stop - 1] + 1) for stop, count in zip(stops, counts, strict=True)]
