"""Prefill of a prompt with pictures: each is seen once, in a turn of its own, before its tokens are computed.

Used on the engine thread. `FeatureCache` keeps what the vision tower made of pictures seen lately, under a budget of
bytes of its own: a picture that comes back in another conversation, or whose prompt was preempted, is not seen again.
`PicturePrefill` is one such prompt under way; behind its last picture it is a prompt like any other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from omlxd.cache.keys import MediaSpan
from omlxd.engine.prefill import Caches, Prefill, Unseen
from omlxd.engine.request import Request
from omlxd.engine.vision_inputs import PictureInput
from omlxd.engine.vision_model import RowShift, VisionModel


class FeatureCache:
    """Pictures' embeddings by their digest, the least recently used going first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._resized: Callable[[int], object] = lambda nbytes: None
        self._kept: OrderedDict[bytes, mx.array] = OrderedDict()
        self.nbytes = 0

    def report_to(self, resized: Callable[[int], object]) -> None:
        """Who is told how many bytes are kept, whenever that changes."""
        self._resized = resized
        resized(self.nbytes)

    def get(self, digest: bytes) -> mx.array | None:
        features = self._kept.get(digest)
        if features is not None:
            self._kept.move_to_end(digest)
        return features

    def put(self, digest: bytes, features: mx.array) -> None:
        """Keeps evaluated features, if they fit at all."""
        if features.nbytes > self._max_bytes or digest in self._kept:
            return
        self._kept[digest] = features
        self.nbytes += features.nbytes
        self.shrink(self._max_bytes)

    def shrink(self, nbytes: int) -> None:
        """Lets go of what is over so many bytes."""
        while self.nbytes > nbytes:
            _, features = self._kept.popitem(last=False)
            self.nbytes -= features.nbytes
        self._resized(self.nbytes)

    def check(self) -> None:
        """Raises AssertionError when the books do not add up."""
        assert self.nbytes == sum(features.nbytes for features in self._kept.values()) <= self._max_bytes


class PicturePrefill(Prefill):
    """A vision model's prompt. Its caches get the leaf that says where its row's positions stand."""

    def __init__(
        self,
        model: VisionModel,
        tokens: Sequence[int],
        caches: Caches,
        done: int,
        *,
        pictures: Sequence[PictureInput],
        features: FeatureCache,
    ) -> None:
        """`pictures` are all of the prompt's, in order; those before `done` are in the caches."""
        super().__init__(model, tokens, caches, done)
        self._vision = model
        self._features = features
        self._pictures = [picture for picture in pictures if picture.span.stop > done]
        self._seen: dict[int, mx.array] = {}  # by the picture's first token
        self._positions: mx.array | None = None
        if model.counts_apart:
            self.caches = [*caches, RowShift([self._count(pictures)])]

    def _count(self, pictures: Sequence[PictureInput]) -> int:
        """Works out the positions up to the last picture; returns by how much what follows runs ahead."""
        if not pictures:
            return 0
        upto = self._tokens[: pictures[-1].span.stop]
        positions, shift = self._vision.positions(upto, [picture.tensors for picture in pictures])
        if self._pictures:
            self._positions = mx.array(positions)[:, None]
        return shift

    @property
    def has_pictures(self) -> bool:
        return bool(self._pictures)

    def unseen(self, num_tokens: int) -> Unseen | None:
        stop = self.done + num_tokens
        next_ones = [picture for picture in self._pictures if picture.span.start < stop]
        return next((self._unseen(picture) for picture in next_ones if not self._has_seen(picture.span)), None)

    def _unseen(self, picture: PictureInput) -> Unseen:
        return Unseen(picture, partial(self._see, picture))

    def _has_seen(self, span: MediaSpan) -> bool:
        if span.start in self._seen:
            return True
        features = self._features.get(span.digest)
        if features is not None:
            self._seen[span.start] = features
        return features is not None

    def _see(self, picture: PictureInput) -> None:
        span = picture.span
        features = self._vision.embed_picture(self._tokens[span.start : span.stop], picture.tensors)
        mx.eval(features)
        self._features.put(span.digest, features)
        self._seen[span.start] = features

    def advance(self, num_tokens: int) -> None:
        """As for any prompt; the pictures among the tokens have been seen."""
        if not self._pictures:
            super().advance(num_tokens)
            return
        stop = self._within(self.done + min(num_tokens, self.remaining))
        tokens = mx.array(list(self._tokens[self.done : stop]))[None]
        positions = None if self._positions is None else self._positions[:, :, self.done : stop]
        self._vision(tokens, cache=self.caches, embeddings=self._embeddings(self.done, stop), positions=positions)
        mx.eval([cache.state for cache in self.caches])
        self._passed(stop)

    def _within(self, stop: int) -> int:
        """Positions are worked out as far as the last picture: a turn does not run on behind it."""
        return min(stop, self._pictures[-1].span.stop)

    def _embeddings(self, start: int, stop: int) -> mx.array:
        """(1, stop - start, width): pictures' features where they stand, the tokens' own in between."""
        pieces, at = [], start
        for picture in self._pictures:
            span = picture.span
            if span.start >= stop:
                break
            if span.start > at:
                pieces.append(self._vision.embed_text(self._tokens[at : span.start]))
            first, at = max(at, span.start), min(span.stop, stop)
            pieces.append(self._seen[span.start][first - span.start : at - span.start])
        if at < stop:
            pieces.append(self._vision.embed_text(self._tokens[at:stop]))
        return mx.concatenate(pieces)[None]

    def _passed(self, stop: int) -> None:
        self.done = stop
        for picture in self._pictures:
            if picture.span.stop <= stop:
                self._seen.pop(picture.span.start)
        self._pictures = [picture for picture in self._pictures if picture.span.stop > stop]
        if not self._pictures:
            self._positions = None


class PicturePrefills:
    """Makes the prefills of one vision model's requests."""

    def __init__(self, model: VisionModel, features: FeatureCache) -> None:
        self._model = model
        self.features = features

    def __call__(self, request: Request, caches: Caches, done: int) -> Prefill:
        """A request's prefill on `caches` that hold its first `done` tokens."""
        pictures = request.job.pictures
        return PicturePrefill(self._model, request.tokens, caches, done, pictures=pictures, features=self.features)
