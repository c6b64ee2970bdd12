"""The engine thread: sole owner of one model, its batch and its requests.

A step takes the commands, admits whom it can (`admitting`), computes at most one prefill turn (`turns`) and one token
of every row (`settling`), and hands the events over to the event loop at once. What is decided is decided in
`scheduler`; what is kept, in `prefixes`; where each request is, in `places`. An exception ends the requests it concerns
and nobody else's: the others come back from the cache. One that returns step after step ends the engine, and everyone
is told.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Sequence

import mlx.core as mx

from omlxd.engine.admitting import Admitting
from omlxd.engine.api import EngineFailed, InvariantError, ModelMetrics, RequestInfo, ShuttingDown
from omlxd.engine.decoder import direct
from omlxd.engine.drawing import RowFailed
from omlxd.engine.fetching import Fetching, Lender
from omlxd.engine.following import Following
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.inbox import Abort, Ask, Close, Closed, Deliver, Inbox, Preempt, Refuse, Submit
from omlxd.engine.job import Job
from omlxd.engine.leaving import Leaving
from omlxd.engine.line import Line
from omlxd.engine.memory import WorkMemory
from omlxd.engine.metrics import Meter
from omlxd.engine.model import LoadedModel
from omlxd.engine.picture_memory import PictureMemory
from omlxd.engine.places import Places
from omlxd.engine.prefill import mergeable, new_caches, weight_bytes
from omlxd.engine.prefixes import Prefixes
from omlxd.engine.prompts import Prompts
from omlxd.engine.reporting import Emit, Reports
from omlxd.engine.request import Clock, Request, State
from omlxd.engine.scheduler import SchedulerLimits
from omlxd.engine.settling import Settling
from omlxd.engine.turns import Turns
from omlxd.engine.unreturned import remains_of

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # steps in a row that may fail before the engine gives up
STUCK_S = 0.1  # how often an engine whose requests all wait for memory looks again


class Worker:
    """The engine thread's side. `run` is the thread's main function."""

    def __init__(
        self,
        loaded: LoadedModel,
        limits: SchedulerLimits,
        inbox: Inbox,
        emit: Emit,
        clock: Clock = time.monotonic,
        guard: MemoryGuard | None = None,
        short: Callable[[], object] = lambda: None,
    ) -> None:
        self._loaded = loaded
        self._decoder = direct(loaded.tokenizer)
        self._inbox = inbox
        self._clock = clock
        self._failures = 0
        self._closing: Close | None = None
        self._uncached = loaded.uncached or (None if loaded.cache is not None else "the cache is switched off")
        self.merges_rows = mergeable(new_caches(loaded.model))
        name, guard = loaded.facts.name, guard or MemoryGuard()
        pictures = PictureMemory(
            name,
            guard.ledger,
            loaded.sight.tower if loaded.sight is not None else None,
            loaded.prefills.features if loaded.prefills is not None else None,
            short,
        )
        memory = WorkMemory(name, guard, loaded.costs, clock, merges_rows=self.merges_rows, pictures=pictures)
        prefixes = Prefixes(loaded.model, loaded.cache, loaded.prefills, self._cache_lost)
        line = Line(clock)
        prompts = Prompts(prefixes, line.defers, weight_bytes(loaded.model) if self.merges_rows else None)
        fetching = Fetching(
            loaded.store,
            prefixes,
            Lender(memory.admit, lend=lambda nbytes: guard.reserve(name, "kv", nbytes)),
            deliver=lambda call: inbox.put(Deliver(call)),
            rate=lambda: prompts.rate.tokens_per_s,
            clock=clock,
        )
        following = Following(clock, block_size=prefixes.block_size)
        places = Places(
            loaded.model, line, fetching, prompts, following, prefixes, memory, merges_rows=self.merges_rows
        )
        meter = Meter(clock)
        reports = Reports(emit, meter, clock, live=lambda: self._places.live)
        leaving = Leaving(places, meter, reports)
        settling = Settling(places, prefixes, memory, leaving, meter, reports, self._decoder)
        self._admitting = Admitting(limits, places, prefixes, memory, leaving, meter, reports, clock)
        self._turns = Turns(
            limits,
            places,
            prefixes,
            memory,
            pictures,
            leaving,
            settling,
            meter,
            reports,
            clock,
            vocab_size=loaded.facts.vocab_size,
        )
        self._memory = memory
        self._prefixes = prefixes
        self._places = places
        self._meter = meter
        self._reports = reports
        self._leaving = leaving
        self._settling = settling

    # -- what others may read, on any thread --------------------------------------------------------------------------

    @property
    def requests(self) -> Sequence[RequestInfo]:
        return self._reports.requests

    @property
    def metrics(self) -> ModelMetrics:
        return self._reports.metrics

    @property
    def uncached(self) -> str | None:
        """Why the model runs without a prefix cache; None if it has one."""
        return self._uncached

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> Closed:
        """Steps until told to close. Everyone who was waiting has an answer when it returns."""
        failure: str | None = None
        while self._closing is None and failure is None:
            try:
                self._take_commands()
                self._step()
                self._failures = 0
            except Exception as exc:  # noqa: BLE001  the top of this thread's loop: some requests end, the rest go on
                failure = self._recover(exc)
            self._reports.tell()
            self._memory.step_over(at_rest=not (self._places.prompts or self._places.rows))
        self._end_all(failure)
        self._reports.tell(now=True)
        return self._let_go(failure)

    def _take_commands(self) -> None:
        places = self._places
        idle = not (places.line or places.prompts or places.rows)
        if idle:
            self._reports.publish(now=True)
        stuck = self._memory.somebody_waits and not (places.prompts or places.rows)
        commands = self._inbox.take(wait=idle or stuck, timeout_s=STUCK_S if stuck else places.fetching.wait_s)
        for command in commands:
            if isinstance(command, Submit):
                self._take_in(command.job)
            elif isinstance(command, Preempt):
                self._leaving.preempt_if_placed(command.id, command.reason)
            elif isinstance(command, Refuse):
                self._leaving.refuse(command)
            elif isinstance(command, Abort):
                self._leaving.abort(command)
            elif isinstance(command, Ask):
                command.call(self._prefixes.cache)
            elif isinstance(command, Deliver):
                command.call()
            else:
                self._closing = command

    def _take_in(self, job: Job) -> None:
        request = Request(job, self._decoder, self._clock)
        self._places.line.add(request)
        refused = self._memory.refusal(request)
        if refused is not None:
            self._leaving.end(request, State.FAILED, refused)

    def _step(self) -> None:
        if self._closing is not None:
            return
        self._admitting.step()
        if self._places.prompts:
            self._turns.step()
        if self._places.rows:
            self._settling.step()
        self._places.concerned = ()

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _recover(self, exc: Exception) -> str | None:
        """Fails the requests that the exception concerns; returns why the engine must end, if it must.

        A row that failed by itself is the only one concerned; a step of the whole batch concerns all of it. Whatever
        was computed in that step cannot be trusted: the batch is made anew, and its other rows come back from the line.
        """
        self._failures += 1
        self._meter.step_failed()
        reason = f"{type(exc).__name__} in a step"
        concerned = [request for request in self._places.concerned if not request.ended]
        if isinstance(exc, RowFailed):
            reason = f"{type(exc.__cause__).__name__} in its own part of a step"
            concerned = [request for request in self._places.taken if request.id == exc.id]
        log.exception("a step of %s failed; it ends: %s", self._loaded.facts.name, [r.id for r in concerned] or "none")
        for request in concerned:
            self._leaving.end(request, State.FAILED, EngineFailed(request.job.model, reason))
        self._places.rebuild(joining=[request for request in self._places.concerned if not request.ended])
        self._places.concerned = ()
        if not concerned or self._failures >= MAX_FAILURES or isinstance(exc, InvariantError):
            return f"{reason}, {self._failures} times in a row"
        return None

    def _end_all(self, failure: str | None) -> None:
        for command in self._inbox.take(wait=False):
            if isinstance(command, Submit):
                self._places.line.add(Request(command.job, self._decoder, self._clock))
        for request in self._places.live:
            if failure is not None:
                self._leaving.end(request, State.FAILED, EngineFailed(request.job.model, failure))
            elif self._closing is not None and self._closing.why == "shutdown":
                self._leaving.end(request, State.FAILED, ShuttingDown())
            else:
                self._leaving.end(request, State.CANCELLED, request.cancelled("model unloaded"))

    def _let_go(self, failure: str | None) -> Closed:
        """Drops the model and everything computed with it; says what came free, or who still has the model."""
        before, accounted = mx.get_active_memory(), self._loaded.facts.weight_bytes + self._memory.held_bytes
        model = weakref.ref(self._loaded.model)
        del self._loaded, self._places, self._prefixes
        del self._admitting, self._turns, self._settling, self._leaving  # each of them has one of these
        gc.collect()
        mx.clear_cache()
        self._memory.close()
        remains = remains_of(model)
        # The difference is that of all engines, and the others go on meanwhile: what is known to be gone needs none.
        freed = max(0, before - mx.get_active_memory())
        if accounted:
            freed = accounted if remains is None else min(freed, accounted)
        return Closed(failure, freed, remains)

    def _cache_lost(self) -> None:
        self._uncached = "its cache was inconsistent; loading the model again brings it back"
