"""The engine thread: sole owner of one model, its batch and its requests.

A step takes the commands, decides (`scheduler.plan`), computes at most one prefill turn and one token of every row,
and hands the events over to the event loop at once. An exception ends the requests it concerns and nobody else's; one
that comes back step after step ends the engine, and everyone is told.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import Literal

import mlx.core as mx

from omlxd.engine.api import EngineFailed, InvariantError, Progress, RequestInfo, ShuttingDown, TokenLogprob
from omlxd.engine.batch import Batch, InterleavedBatch, MergedBatch, RowStart, RowToken
from omlxd.engine.inbox import Abort, Close, Closed, Inbox, Submit
from omlxd.engine.job import Job
from omlxd.engine.model import LoadedModel
from omlxd.engine.prefill import Prefill, mergeable, new_caches
from omlxd.engine.rate import PrefillRate
from omlxd.engine.request import Clock, Request, State
from omlxd.engine.sampling import SamplerRow, logprobs_of, processors
from omlxd.engine.scheduler import Plan, SchedulerLimits, View, Waiting, plan
from omlxd.engine.stream import Event

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # steps in a row that may fail before the engine gives up
AGEING_S = 30.0  # after this long a batch request waits like an interactive one
SNAPSHOT_S = 0.1  # how old the published request list may be

Events = Sequence[tuple[str, Event]]
Emit = Callable[[Events], None]


class Worker:
    """The engine thread's side. `run` is the thread's main function; only `requests` may be read elsewhere."""

    def __init__(
        self, loaded: LoadedModel, limits: SchedulerLimits, inbox: Inbox, emit: Emit, clock: Clock = time.monotonic
    ) -> None:
        self._loaded = loaded
        self._limits = limits
        self._inbox = inbox
        self._emit = emit
        self._clock = clock
        self._waiting: dict[str, Request] = {}  # in order of arrival
        self._prefills: dict[str, Prefill] = {}
        self._last_turn: dict[str, int] = {}
        self._decoding: dict[str, Request] = {}
        self.merges_rows = mergeable(new_caches(loaded.model))
        self._batch: Batch = self._new_batch()
        self._rate = PrefillRate()
        self._after_long = False
        self._steps = 0
        self._failures = 0
        self._closing: Close | None = None
        self._concerned: Sequence[Request] = ()
        self._events: list[tuple[str, Event]] = []
        self._published = 0.0
        self.requests: tuple[RequestInfo, ...] = ()

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
            self._publish()
            self._flush()
        self._end_all(failure)
        self._publish(now=True)
        self._flush()
        return Closed(failure, self._let_go())

    def _take_commands(self) -> None:
        idle = not self._waiting and not self._decoding
        if idle:
            self._publish(now=True)
        for command in self._inbox.take(wait=idle):
            if isinstance(command, Submit):
                self._submit(command.job)
            elif isinstance(command, Abort):
                self._abort(command)
            else:
                self._closing = command

    def _step(self) -> None:
        if self._closing is not None:
            return
        self._steps += 1
        decided = plan(self._view(), self._limits)
        self._carry_out(decided)
        if self._decoding:
            self._concerned = list(self._decoding.values())
            self._settle(self._batch.step())
        self._concerned = ()

    # -- commands -----------------------------------------------------------------------------------------------------

    def _submit(self, job: Job) -> None:
        self._waiting[job.id] = Request(job, self._loaded.tokenizer, self._clock)

    def _abort(self, command: Abort) -> None:
        request = self._waiting.get(command.id) or self._decoding.get(command.id)
        if request is None:
            return  # it ended before the command came
        self._end(request, State.CANCELLED, request.cancelled(command.reason))
        self._batch.remove(frozenset({request.id}))

    # -- prefill ------------------------------------------------------------------------------------------------------

    def _view(self) -> View:
        now = self._clock()
        return View(
            decoding=len(self._decoding),
            waiting=[self._waiting_view(request, now) for request in self._waiting.values()],
            rate=self._rate.tokens_per_s,
            after_long=self._after_long,
        )

    def _waiting_view(self, request: Request, now: float) -> Waiting:
        return Waiting(
            id=request.id,
            remaining=len(request.job.prompt) - request.computed,
            batch_priority=request.job.batch_priority and now - request.submitted < AGEING_S,
            admitted=request.state is State.PREFILL,
            last_turn=self._last_turn.get(request.id, -1),
        )

    def _carry_out(self, decided: Plan) -> None:
        for id in decided.admit:
            request = self._waiting[id]
            request.enter(State.PREFILL)
            self._prefills[id] = Prefill(self._loaded.model, request.job.prompt, new_caches(self._loaded.model))
        if decided.solo is not None:
            self._advance(self._waiting[decided.solo], decided.tokens)
        elif decided.join:
            self._join([self._waiting[id] for id in decided.join])

    def _advance(self, request: Request, num_tokens: int) -> None:
        self._concerned = [request]
        prefill = self._prefills[request.id]
        began = self._clock()
        prefill.advance(num_tokens)
        self._rate.measured(prefill.done - request.computed, self._clock() - began)
        request.computed = prefill.done
        self._last_turn[request.id] = self._steps
        self._after_long = True
        self._report_prefill(request)

    def _join(self, group: Sequence[Request]) -> None:
        # A failure while the rows enter may have left the running batch half extended: all of it is concerned.
        self._concerned = [*group, *self._decoding.values()]
        rows = [self._row(request) for request in group]
        began = self._clock()
        self._batch.join(rows)
        self._rate.measured(len(rows) * max(len(row.tokens) for row in rows), self._clock() - began)
        self._after_long = False
        for request in group:
            request.computed = len(request.job.prompt)
            self._report_prefill(request)
            request.enter(State.DECODE)
            self._forget_prefill(request)
            self._decoding[request.id] = request

    def _row(self, request: Request) -> RowStart:
        job, prefill = request.job, self._prefills[request.id]
        return RowStart(
            id=job.id,
            caches=prefill.caches,
            tokens=prefill.rest,
            sampler=SamplerRow(job.sampling),
            processors=processors(
                job.sampling, job.logit_bias, prompt=job.prompt[:-1], vocab_size=self._loaded.facts.vocab_size
            ),
        )

    def _report_prefill(self, request: Request) -> None:
        if request.job.progress:
            self._say(request, Progress("prefill", request.computed, len(request.job.prompt)))

    # -- decode -------------------------------------------------------------------------------------------------------

    def _settle(self, tokens: Sequence[RowToken]) -> None:
        """Gives every row its token; rows whose answer ended leave the batch."""
        gone = []
        for row in tokens:
            request = self._decoding[row.id]
            entry = self._logprob(row, request.job.logprobs) if request.job.logprobs else None
            delta, reason = request.accept(row.token_id, entry)
            if delta is not None:
                self._say(request, delta)
            if reason is not None:
                self._end(request, State.FINISHED, request.result(reason))
                gone.append(row.id)
        if gone:
            self._batch.remove(frozenset(gone))

    def _logprob(self, row: RowToken, count: int) -> TokenLogprob:
        chosen, best = logprobs_of(row.logprobs, row.token_id, count)
        top = [TokenLogprob(id, self._text_of(id), value) for id, value in best]
        return TokenLogprob(row.token_id, self._text_of(row.token_id), chosen, top)

    def _text_of(self, token_id: int) -> str:
        return str(self._loaded.tokenizer.decode([token_id]))

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self, request: Request, state: State, event: Event) -> None:
        request.enter(state)
        self._say(request, event)
        self._decoding.pop(request.id, None)
        self._forget_prefill(request)

    def _forget_prefill(self, request: Request) -> None:
        self._waiting.pop(request.id, None)
        self._prefills.pop(request.id, None)
        self._last_turn.pop(request.id, None)

    def _recover(self, exc: Exception) -> str | None:
        """Fails the requests that the exception concerns. Returns why the engine must end, if it must."""
        self._failures += 1
        reason = f"{type(exc).__name__} in a step"
        concerned = [request for request in self._concerned if not request.ended]
        log.exception("a step of %s failed; requests concerned: %s", self._name, [r.id for r in concerned] or "none")
        rows = [request for request in concerned if request.state is State.DECODE]
        for request in concerned:
            self._end(request, State.FAILED, EngineFailed(request.job.model, reason))
        if rows or not self._decoding:
            self._batch = self._new_batch()
        self._concerned = ()
        if not concerned or self._failures >= MAX_FAILURES or isinstance(exc, InvariantError):
            return f"{reason}, {self._failures} times in a row"
        return None

    def _end_all(self, failure: str | None) -> None:
        why: Literal["unloaded", "shutdown"] = self._closing.why if self._closing is not None else "unloaded"
        leftover = [c.job for c in self._inbox.take(wait=False) if isinstance(c, Submit)]
        for job in leftover:
            self._submit(job)
        for request in [*self._waiting.values(), *self._decoding.values()]:
            if failure is not None:
                self._end(request, State.FAILED, EngineFailed(request.job.model, failure))
            elif why == "shutdown":
                self._end(request, State.FAILED, ShuttingDown())
            else:
                self._end(request, State.CANCELLED, request.cancelled("model unloaded"))

    def _let_go(self) -> int:
        """Drops the model and everything computed with it; returns the bytes that came free."""
        before = mx.get_active_memory()
        del self._batch, self._loaded
        gc.collect()
        mx.clear_cache()
        return max(0, before - mx.get_active_memory())

    # -- small things -------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        return self._loaded.facts.name

    def _new_batch(self) -> Batch:
        return MergedBatch(self._loaded.model) if self.merges_rows else InterleavedBatch(self._loaded.model)

    def _say(self, request: Request, event: Event) -> None:
        self._events.append((request.id, event))

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._emit(events)

    def _publish(self, *, now: bool = False) -> None:
        if now or self._clock() - self._published >= SNAPSHOT_S:
            self._published = self._clock()
            live = [*self._waiting.values(), *self._decoding.values()]
            self.requests = tuple(request.info() for request in live)
