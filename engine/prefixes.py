"""What the engine keeps of every request: prefixes restored before a prompt is computed, and stored while it is.

Stands between the scheduler's loop and the model's `PrefixCache`, on the engine thread. Whole blocks are stored after
each turn and as they fill while decoding; the rest, with a checkpoint for models whose state cannot be cut, at the
prompt's end, at the answer's end, and when a request leaves early. A model without a cache, and a request that wants
none, go through the same calls and store nothing.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from mlx.nn.layers.base import Module

from omlxd.cache.errors import CacheInvariantError
from omlxd.cache.prefix import Hit, PrefixCache, Standing
from omlxd.cache.restoration import Restoration
from omlxd.engine.prefill import Prefill, new_caches
from omlxd.engine.request import Request

log = logging.getLogger(__name__)

# How far apart a long prompt's checkpoints are, for models whose state cannot be cut.
CHECKPOINT_TOKENS = 2048

Caches = list[Any]
MakePrefill = Callable[[Request, Caches, int], Prefill]


@dataclass(slots=True)
class _Kept:
    """What is known of one live request: the pinned hit it began with, and up to where it is stored."""

    hit: Hit
    computed: int
    stored: int
    stops: list[int]  # positions to come at which everything is stored, ascending


@dataclass(frozen=True, slots=True)
class _Lent:
    """What was read from disk beyond the cache's budget, and the requests that are still to begin with it."""

    restoration: Restoration
    waiting: set[str]


class Prefixes:
    """The prefixes of one model's requests."""

    def __init__(
        self,
        model: Module,
        cache: PrefixCache | None,
        prefill: MakePrefill | None = None,
        given_up: Callable[[], object] = lambda: None,
    ) -> None:
        """`prefill` makes a request's prefill on caches that hold so many of its tokens; a plain one unless given.

        `given_up` is called when the cache is not used any more, because it was inconsistent.
        """
        self._model = model
        self._given_up = given_up
        self._cache = cache
        self._prefill = prefill or self._plain_prefill
        self._stride = cache.publish_stride if cache is not None else 0
        self._live: dict[str, _Kept] = {}
        self._lent: dict[str, _Lent] = {}

    @property
    def cache(self) -> PrefixCache | None:
        """None for a model without one, and after it has been given up."""
        return self._cache

    @property
    def block_size(self) -> int:
        return self._cache.block_size if self._cache is not None else 0

    @property
    def only_at_checkpoints(self) -> bool:
        return self._cache is not None and self._cache.recurrent

    def sharing(self) -> AbstractContextManager[None]:
        """Inside, requests that begin with the same prefix share its memory until each goes on."""
        return nullcontext() if self._cache is None else self._cache.sharing()

    # -- before -------------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> Prefill:
        """Restores the longest stored prefix of the request's tokens."""
        if self._cache is None or not request.job.use_cache:
            return self._prefill(request, new_caches(self._model), 0)
        hit = self._cache.lookup(request.tokens, request.media)
        self._let_go(request.id)
        self._live[request.id] = _Kept(
            hit, computed=hit.num_tokens, stored=hit.num_tokens, stops=self._stops(request, hit.num_tokens)
        )
        if not request.drawn:
            request.cached = hit.num_tokens
        request.computed = min(hit.num_tokens, len(request.job.prompt))
        return self._prefill(request, hit.caches, hit.num_tokens)

    def _plain_prefill(self, request: Request, caches: Caches, done: int) -> Prefill:
        return Prefill(self._model, request.tokens, caches, done)

    def standing(self, request: Request) -> Standing | None:
        """What memory has of the request's tokens, for the disk to go on from; None without a cache."""
        return None if self._cache is None else self._cache.standing(request.tokens, request.media)

    def restoration(self, request: Request) -> Restoration | None:
        """For what will be read from disk of the request's prefix; None without a cache."""
        return None if self._cache is None else self._cache.restoration(request.tokens, request.media)

    def keep(self, restoration: Restoration, requests: Sequence[Request]) -> None:
        """Keeps what was read until all of these have begun, or left."""
        waiting = {request.id for request in requests}
        if not waiting:
            restoration.release()
        for id in waiting:
            self._let_go(id)  # of an earlier read, which this one goes on from: who followed another may read twice
            self._lent[id] = _Lent(restoration, waiting)

    def _let_go(self, id: str) -> None:
        """The request has its caches, or needs none: it does not wait for what was read for it any more."""
        lent = self._lent.pop(id, None)
        if lent is not None:
            lent.waiting.discard(id)
            if not lent.waiting:
                lent.restoration.release()

    def would_reuse(self, request: Request) -> int:
        """How many of the request's tokens are stored now."""
        if self._cache is None or not request.job.use_cache:
            return 0
        return self._cache.match_length(request.tokens, request.media)

    def _stops(self, request: Request, done: int) -> list[int]:
        """Where checkpoints are to be taken: at the ends of messages, and every so often in between."""
        if not self.only_at_checkpoints:
            return []
        last = request.length - 1
        regular = range(CHECKPOINT_TOKENS, last, CHECKPOINT_TOKENS)
        return sorted({stop for stop in (*request.job.boundaries, *regular) if done < stop < last})

    def stop_at(self, id: str, position: int) -> None:
        """Another request needs what is computed up to here: stores it to the token on the way."""
        kept = self._live.get(id)
        if kept is not None and position not in kept.stops:
            insort(kept.stops, position)

    def until_stop(self, request: Request, done: int, remaining: int) -> int:
        """How many tokens may be computed before something is to be stored: `remaining` if nothing is."""
        kept = self._live.get(request.id)
        return kept.stops[0] - done if kept is not None and kept.stops else remaining

    def stored(self, request: Request) -> int:
        """How many of the request's tokens others can reuse by now."""
        kept = self._live.get(request.id)
        return kept.stored if kept is not None else 0

    # -- meanwhile ----------------------------------------------------------------------------------------------------

    def after_turn(self, request: Request, caches: Caches, position: int) -> None:
        """The prompt has been computed up to `position`, on caches of its own."""
        kept = self._live.get(request.id)
        if kept is None:
            return
        self._count(kept, position)
        if kept.stops and kept.stops[0] == position:
            kept.stops.pop(0)
            self._checkpoint(request, caches, position)
        elif position >= request.length - 1:
            self._checkpoint(request, caches, position)
        else:
            self._publish(request, caches, self._whole(position))

    def joined(self, request: Request) -> None:
        """The last of the request's tokens has been computed too."""
        kept = self._live.get(request.id)
        if kept is not None:
            self._count(kept, request.length)

    def _count(self, kept: _Kept, position: int) -> None:
        if self._cache is not None:
            self._cache.count_computed(position - kept.computed)
        kept.computed = position

    def fills_a_block(self, request: Request) -> bool:
        """Whether the row has drawn a block's worth of tokens that are not stored yet."""
        kept = self._live.get(request.id)
        return kept is not None and request.length - kept.stored >= self._stride

    def while_decoding(self, request: Request, caches: Caches, lacking: int) -> None:
        """Stores the blocks that have filled; `caches` lack that many of the request's tokens."""
        self._publish(request, caches, self._whole(request.length - lacking))

    def leave(self, request: Request, caches: Caches, position: int) -> None:
        """Stores everything up to `position`, where the caches stand: the request ends, or leaves the batch."""
        if position > 0:
            self._checkpoint(request, caches, position)

    def forget(self, request: Request) -> None:
        """Ends the request's pins."""
        self._let_go(request.id)
        kept = self._live.pop(request.id, None)
        if kept is not None:
            kept.hit.release()

    # -- storing ------------------------------------------------------------------------------------------------------

    def _whole(self, position: int) -> int:
        """Up to where it is worth storing at `position`: whole blocks, but for windows that would lose rows by then."""
        return position if self._stride < self.block_size else position - position % self.block_size

    def _publish(self, request: Request, caches: Caches, upto: int) -> None:
        kept = self._live.get(request.id)
        if self._cache is None or kept is None or upto <= kept.stored:
            return
        try:
            self._cache.publish(request.tokens, caches, upto, request.media, since=kept.stored)
        except CacheInvariantError:
            self._give_up()
        kept.stored = upto

    def _checkpoint(self, request: Request, caches: Caches, position: int) -> None:
        kept = self._live.get(request.id)
        if self._cache is None or kept is None:
            return
        if not self.only_at_checkpoints and position <= kept.stored:
            return
        try:
            self._cache.checkpoint(request.tokens, caches, position, request.media, since=kept.stored)
        except CacheInvariantError:
            self._give_up()
        kept.stored = position

    def _give_up(self) -> None:
        """Our own bookkeeping is broken: the model goes on without its cache, and that is said loudly."""
        log.exception("the prefix cache is inconsistent; this model runs without it from now on")
        if self._cache is not None:
            self._cache.close()
        self._cache = None
        self._given_up()
