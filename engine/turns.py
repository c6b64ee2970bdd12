"""Turns: one step's share of the prompts under way, and their rows' entry into the batch.

Owned by the engine thread; a part of its step. `scheduler.turn` decides whose prompt is computed and how much of it;
here that is done, measured, stored and told.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from omlxd.engine.api import EngineFailed
from omlxd.engine.joining import at_once
from omlxd.engine.leaving import Leaving
from omlxd.engine.memory import WorkMemory
from omlxd.engine.metrics import Meter
from omlxd.engine.picture_memory import PictureMemory
from omlxd.engine.places import Places
from omlxd.engine.prefill import TOWER_FAILURES, Caches, Prefill, Unseen
from omlxd.engine.prefixes import Prefixes
from omlxd.engine.reporting import Reports
from omlxd.engine.request import Clock, Request, State
from omlxd.engine.rows import row_start
from omlxd.engine.scheduler import SchedulerLimits, turn
from omlxd.engine.settling import Settling

log = logging.getLogger(__name__)


class Turns:
    """Computes one engine's prompts."""

    def __init__(
        self,
        limits: SchedulerLimits,
        places: Places,
        prefixes: Prefixes,
        memory: WorkMemory,
        pictures: PictureMemory,
        leaving: Leaving,
        settling: Settling,
        meter: Meter,
        reports: Reports,
        clock: Clock,
        *,
        vocab_size: int,
    ) -> None:
        self._limits = limits
        self._places = places
        self._prompts = places.prompts
        self._prefixes = prefixes
        self._memory = memory
        self._pictures = pictures
        self._leaving = leaving
        self._settling = settling
        self._meter = meter
        self._reports = reports
        self._clock = clock
        self._vocab_size = vocab_size

    def step(self) -> None:
        """Computes at most one turn."""
        view = self._prompts.view(decoding=len(self._places.rows), waiting=self._places.line.waiting)
        decided = turn(view, self._memory.turn_limits(self._limits, self._prompts.prefills))
        if decided.solo is not None:
            self._advance(*self._prompts[decided.solo], decided.tokens)
        elif decided.one_by_one:
            self._join_one_by_one(decided.join)
        elif decided.join:
            self._join([self._prompts[id] for id in decided.join])

    def _advance(self, request: Request, prefill: Prefill, num_tokens: int) -> None:
        self._places.concerned = [request]
        unseen = prefill.unseen(num_tokens)
        if unseen is not None:
            self._see(request, unseen)
            return
        before, began = prefill.done, self._clock()
        with self._memory.turn(tokens=num_tokens, context=before + num_tokens):
            prefill.advance(num_tokens)
        elapsed_s = self._clock() - began
        self._meter.prefilled(prefill.done - before, elapsed_s)
        self._prompts.advanced(request, prefill, prefill.done - before, elapsed_s)
        self._stored(request, prefill.caches, prefill.done)
        self._leaving.end_if_warm(request, prefill)

    def _see(self, request: Request, unseen: Unseen) -> None:
        """Has the vision tower see one picture: a turn of its own, for it cannot be cut.

        A picture that it cannot take ends its own request. Nobody else's caches have been touched: the batch goes on.
        """
        began = self._clock()
        try:
            with self._pictures.seeing(unseen.picture):
                unseen.see()
        except TOWER_FAILURES as exc:
            log.exception("a picture could not be seen by %s; it ends: %s", request.job.model, request.id)
            reason = f"{type(exc).__name__} in its vision tower"
            self._leaving.end(request, State.FAILED, EngineFailed(request.job.model, reason))
            return
        self._meter.saw(self._clock() - began)
        self._prompts.saw(request)

    def _join_one_by_one(self, ids: Sequence[str]) -> None:
        """Lets them enter until the next one would keep the others waiting for too long."""
        began = self._clock()
        for number, id in enumerate(ids, start=1):
            if id not in self._prompts:
                continue  # it made way for one before it
            self._join([self._prompts[id]])
            if (self._clock() - began) * (number + 1) / number > self._limits.max_decode_stall_ms / 1e3:
                break

    def _join(self, group: Sequence[tuple[Request, Prefill]]) -> None:
        # A failure while the rows enter may have left the running batch half extended: then it is rebuilt.
        self._places.concerned = [request for request, _ in group]
        requests = {request.id: (request, prefill) for request, prefill in group}
        counts = [prefill.remaining + 1 for _, prefill in group]
        began = self._clock()
        longest = max(request.length for request, _ in group)

        def stored(id: str, caches: Caches, lacking: int) -> None:
            request, _ = requests[id]
            self._stored(request, caches, request.length - lacking)

        logits = at_once(len(group) * max(counts))
        with self._memory.turn(tokens=max(counts), context=longest, rows=len(group), logits=logits):
            rows = [row_start(request, prefill, vocab_size=self._vocab_size) for request, prefill in group]
            first = self._places.batch.join(rows, stored)
        elapsed_s = self._clock() - began
        self._meter.prefilled(sum(counts), elapsed_s)
        self._prompts.joined(len(counts) * max(counts), elapsed_s)
        for request, _ in group:
            self._prefixes.joined(request)
            self._reports.computed(request, len(request.job.prompt))
            self._places.forget_prompt(request)
            self._memory.joined(request)
            request.enter(State.DECODE)
            self._places.rows[request.id] = request
        self._settling.joined(first)

    def _stored(self, request: Request, caches: Caches, position: int) -> None:
        """The request's tokens have been computed up to `position`."""
        self._prefixes.after_turn(request, caches, position)
        self._places.following.moved(request, computed=position, stored=self._prefixes.stored(request))
        self._reports.computed(request, min(position, len(request.job.prompt)))
