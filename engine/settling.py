"""Settling: one token for each row of the batch, given to its request and told.

Owned by the engine thread; a part of its step. Rows whose answer has ended leave, blocks that have filled are stored,
and where an answer grows beyond the memory there is, whoever loses least makes way.
"""

from __future__ import annotations

from collections.abc import Sequence

from omlxd.engine.drawing import RowToken
from omlxd.engine.inbox import SHORT_OF_MEMORY
from omlxd.engine.leaving import Leaving
from omlxd.engine.memory import WorkMemory
from omlxd.engine.metrics import Meter
from omlxd.engine.places import Places
from omlxd.engine.prefixes import Prefixes
from omlxd.engine.reporting import Reports
from omlxd.engine.request import Request, State
from omlxd.engine.rows import logprob
from omlxd.engine.scheduler import Row, makes_way
from omlxd.engine.text import Decoder


class Settling:
    """Decodes one engine's rows."""

    def __init__(
        self,
        places: Places,
        prefixes: Prefixes,
        memory: WorkMemory,
        leaving: Leaving,
        meter: Meter,
        reports: Reports,
        decoder: Decoder,
    ) -> None:
        self._places = places
        self._prefixes = prefixes
        self._memory = memory
        self._leaving = leaving
        self._meter = meter
        self._reports = reports
        self._decoder = decoder

    def step(self) -> None:
        """Tells every row's token while the first part of the next pass is computed, then begins the rest of it."""
        batch = self._places.batch
        self._places.concerned = list(self._places.rows.values())
        tokens = batch.step()
        if tokens:  # none if all rows have just joined
            self._meter.stepped(len(tokens))
            self._settle(tokens)
            self._reports.tell()
            self._places.concerned = list(self._places.rows.values())
        batch.draw()

    def joined(self, first: Sequence[RowToken]) -> None:
        """Takes the first tokens of rows that have joined. Nobody waits for the next step to see them."""
        self._meter.joined(len(first))
        self._settle(first)
        self._reports.tell()

    def _settle(self, tokens: Sequence[RowToken]) -> None:
        """Gives every row its token; rows whose answer ended leave the batch."""
        gone: list[str] = []
        short: list[Request] = []
        for row in tokens:
            request = self._places.rows[row.id]
            self._meter.drew(request)
            deltas, reason = request.accept(row.token_id, logprob(row, self._decoder))
            for delta in deltas:
                self._reports.say(request, delta)
            failure = request.failure
            if failure is not None or reason is not None:
                self._places.keep(request)
                if failure is not None:
                    self._leaving.end(request, State.FAILED, failure)
                elif reason is not None:
                    self._leaving.end(request, State.FINISHED, request.result(reason))
                gone.append(row.id)
            else:
                if not self._memory.grow(request):
                    short.append(request)
                if self._prefixes.fills_a_block(request):
                    self._prefixes.while_decoding(request, *self._places.batch.caches(row.id))
        if gone:
            self._places.batch.remove(frozenset(gone))
        for request in short:
            self._make_way_for(request)

    def _make_way_for(self, request: Request) -> None:
        """The answer grows, and there is no memory for that: whoever loses least leaves, it itself at the last."""
        places = self._places
        if self._memory.is_spent(request) and request.id in places.rows:
            self._leaving.preempt(request.id, SHORT_OF_MEMORY)
        elif not self._memory.somebody_leaves:
            rows = [Row(each.id, places.line.defers(each)) for each in [*places.rows.values(), *places.prompts]]
            self._leaving.preempt(makes_way(rows), SHORT_OF_MEMORY)
