"""The engine thread: sole owner of one model, its batch and its requests.

A step takes the commands, admits whom it can, computes at most one prefill turn and one token of every row, and hands
the events over to the event loop at once. What is decided is decided in `scheduler`; what is kept, in `prefixes`. An
exception ends the requests it concerns and nobody else's: the others come back from the cache. One that returns step
after step ends the engine, and everyone is told.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Sequence

import mlx.core as mx

from omlxd.engine.api import (
    EngineFailed,
    InvariantError,
    ModelMetrics,
    QueueFull,
    RequestInfo,
    ShuttingDown,
)
from omlxd.engine.decoder import direct
from omlxd.engine.drawing import RowFailed, RowToken
from omlxd.engine.fetching import Fetching, Lender
from omlxd.engine.following import Following
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.inbox import SHORT_OF_MEMORY, Abort, Ask, Close, Closed, Deliver, Inbox, Preempt, Refuse, Submit
from omlxd.engine.job import Job
from omlxd.engine.joining import at_once
from omlxd.engine.line import Line
from omlxd.engine.memory import WAITS_FOR_MEMORY, WorkMemory
from omlxd.engine.metrics import Meter
from omlxd.engine.model import LoadedModel
from omlxd.engine.picture_memory import PictureMemory
from omlxd.engine.places import Places
from omlxd.engine.prefill import TOWER_FAILURES, Caches, Prefill, Unseen, mergeable, new_caches
from omlxd.engine.prefixes import Prefixes
from omlxd.engine.prompts import Prompts
from omlxd.engine.reporting import Emit, Reports
from omlxd.engine.request import Clock, Request, State
from omlxd.engine.rows import logprob, row_start
from omlxd.engine.scheduler import Row, SchedulerLimits, Turn, admission, makes_way, turn
from omlxd.engine.stream import Event
from omlxd.engine.unreturned import remains_of

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # steps in a row that may fail before the engine gives up
OVERDUE_S = 1.0  # how often the line is looked through for those who have waited too long
OVERDUE_RETRY_MS = 60_000  # for them: whoever waits an hour waits for more than one request to end
# How many of the line's first are looked at for a free row beyond the rows themselves: held ones make way for others.
LOOKAHEAD = 8
PASSED_BY_S = 2.0  # how long those who need less memory may go before one who waits for it
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
        self._limits = limits
        self._inbox = inbox
        self._clock = clock
        self.merges_rows = mergeable(new_caches(loaded.model))
        self._prefixes = Prefixes(loaded.model, loaded.cache, loaded.prefills)
        self._following = Following(clock, block_size=self._prefixes.block_size)
        name, guard = loaded.facts.name, guard or MemoryGuard()
        tower = loaded.sight.tower if loaded.sight is not None else None
        self._pictures = PictureMemory(
            name, guard.ledger, tower, loaded.prefills.features if loaded.prefills is not None else None, short
        )
        self._memory = WorkMemory(
            name, guard, loaded.costs, clock, merges_rows=self.merges_rows, pictures=self._pictures
        )
        self._line = Line(clock)
        self._fetching = Fetching(
            loaded.store,
            self._prefixes,
            Lender(self._memory.admit, lend=lambda nbytes: guard.reserve(name, "kv", nbytes)),
            deliver=lambda call: inbox.put(Deliver(call)),
            rate=lambda: self._prompts.rate.tokens_per_s,
            clock=clock,
        )
        self._prompts = Prompts(self._prefixes, self._line.defers)
        self._places = Places(
            loaded.model,
            self._line,
            self._fetching,
            self._prompts,
            self._following,
            self._prefixes,
            self._memory,
            merges_rows=self.merges_rows,
        )
        self._meter = Meter(clock)
        self._reports = Reports(emit, self._meter, clock)
        self._failures = 0
        self._closing: Close | None = None
        self._concerned: Sequence[Request] = ()
        self._looked_through = clock()
        self._uncached = loaded.uncached or (None if loaded.cache is not None else "the cache is switched off")

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
            self._tell()
            self._memory.step_over(at_rest=not (self._prompts or self._places.rows))
        self._end_all(failure)
        self._tell(now=True)
        return self._let_go(failure)

    def _take_commands(self) -> None:
        idle = not (self._line or self._prompts or self._places.rows)
        if idle:
            self._publish(now=True)
        stuck = self._memory.somebody_waits and not (self._prompts or self._places.rows)
        commands = self._inbox.take(wait=idle or stuck, timeout_s=STUCK_S if stuck else self._fetching.wait_s)
        for command in commands:
            if isinstance(command, Submit):
                self._take_in(command.job)
            elif isinstance(command, Preempt):
                if command.id in self._places.rows or command.id in self._prompts:
                    self._preempt(command.id, command.reason)
            elif isinstance(command, Refuse):
                self._refuse(command)
            elif isinstance(command, Abort):
                self._abort(command)
            elif isinstance(command, Ask):
                command.call(self._prefixes.cache)
            elif isinstance(command, Deliver):
                command.call()
            else:
                self._closing = command

    def _step(self) -> None:
        if self._closing is not None:
            return
        self._line.release([hold for hold in self._line.holds if self._following.over(hold)])
        self._end_overdue()
        self._take_fetched()
        if self._line:
            with self._prefixes.sharing():
                self._admit()
        if self._prompts:
            view = self._prompts.view(decoding=len(self._places.rows), waiting=self._line.waiting)
            self._compute(turn(view, self._memory.turn_limits(self._limits, self._prompts.prefills)))
        if self._places.rows:
            self._decode()
        self._concerned = ()

    def _decode(self) -> None:
        """Tells every row's token while the first part of the next pass is computed, then begins the rest of it."""
        batch = self._places.batch
        self._concerned = list(self._places.rows.values())
        tokens = batch.step()
        if tokens:  # none if all rows have just joined
            self._meter.stepped(len(tokens))
            self._settle(tokens)
            self._tell()
            self._concerned = list(self._places.rows.values())
        batch.draw()

    def _take_in(self, job: Job) -> None:
        request = Request(job, self._decoder, self._clock)
        self._line.add(request)
        refused = self._memory.refusal(request)
        if refused is not None:
            self._end(request, State.FAILED, refused)

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        began = self._clock()
        rows = [Row(request.id, self._line.defers(request)) for request in self._places.taken]
        decided = admission(rows, self._limits, interactive_waits=self._line.interactive_waits)
        free = decided.free
        for request in self._line.head(free + LOOKAHEAD if free else 0):
            if not free:
                break
            if decided.preempt is not None and self._line.defers(request):
                continue  # nobody is preempted for one who would be next
            if self._fetching.begin(request):
                self._line.remove(request)
                request.enter(State.FETCHING, "its prefix is read from disk")
                free -= 1
                continue
            hold = self._following.hold_for(request, self._prefixes.would_reuse)
            if hold is not None:
                self._line.hold(hold)
                self._prefixes.stop_at(hold.leader, hold.until)
                self._meter.held()
                self._reports.waits(request)
                continue
            if not self._has_memory(request):
                if self._clock() - request.waits_since > PASSED_BY_S:
                    break  # nobody passes any more, or one who needs much would wait for ever
                continue
            if decided.preempt is not None:
                self._preempt(decided.preempt, "preempted by an interactive request")
            self._begin(request)
            free -= 1
            if self._places.rows and self._clock() - began >= self._limits.max_decode_stall_ms / 1e3:
                break  # long prefixes take their time to be restored: the others' are in the next steps

    def _take_fetched(self) -> None:
        for request in reversed(self._fetching.over()):
            request.enter(State.QUEUED)
            self._line.put_first(request)

    def _has_memory(self, request: Request) -> bool:
        if self._memory.admit(request):
            return True
        in_vain = self._memory.lost_patience(request)
        if in_vain is not None:
            self._end(request, State.FAILED, in_vain)
        elif request.reason != WAITS_FOR_MEMORY:
            request.enter(State.HELD, WAITS_FOR_MEMORY)
            request.enter(State.QUEUED, WAITS_FOR_MEMORY)
            self._meter.held()
            self._reports.waits(request)
        return False

    def _begin(self, request: Request) -> None:
        self._concerned = [request]
        self._line.remove(request)
        is_new = request.started is None
        request.enter(State.PREFILL)
        prefill = self._prefixes.begin(request)
        if is_new:
            self._meter.admitted(request)
        self._prompts.add(request, prefill)
        if self._is_warm(request, prefill):
            return
        self._following.lead(request, prefill.done)

    def _preempt(self, id: str, reason: str) -> None:
        """Takes a request out of its place and back into the line; what it has computed is kept."""
        request = self._places.rows.get(id) or self._prompts[id][0]
        self._places.keep(request)
        self._places.requeue(request, reason)
        self._meter.preempted()
        self._reports.waits(request)

    def _end_overdue(self) -> None:
        if not self._line or self._clock() - self._looked_through < OVERDUE_S:
            return
        self._looked_through = self._clock()
        for request in self._line.overdue():
            waited_s = self._clock() - request.waits_since
            self._end(request, State.FAILED, QueueFull(len(self._line), OVERDUE_RETRY_MS, waited_s=waited_s))

    # -- prompts ------------------------------------------------------------------------------------------------------

    def _compute(self, decided: Turn) -> None:
        if decided.solo is not None:
            self._advance(*self._prompts[decided.solo], decided.tokens)
        elif decided.join:
            self._join([self._prompts[id] for id in decided.join])

    def _advance(self, request: Request, prefill: Prefill, num_tokens: int) -> None:
        self._concerned = [request]
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
        self._is_warm(request, prefill)

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
            self._end(request, State.FAILED, EngineFailed(request.job.model, reason))
            return
        self._meter.saw(self._clock() - began)
        self._prompts.saw(request)

    def _is_warm(self, request: Request, prefill: Prefill) -> bool:
        """Ends a request that only warms the cache, once all that can be stored of its prompt is."""
        if not request.job.warm or prefill.remaining:
            return False
        self._end(request, State.FINISHED, request.result("stop"))
        return True

    def _join(self, group: Sequence[tuple[Request, Prefill]]) -> None:
        # A failure while the rows enter may have left the running batch half extended: then it is rebuilt.
        self._concerned = [request for request, _ in group]
        requests = {request.id: (request, prefill) for request, prefill in group}
        counts = [prefill.remaining + 1 for _, prefill in group]
        began = self._clock()
        longest, vocab_size = max(request.length for request, _ in group), self._loaded.facts.vocab_size

        def stored(id: str, caches: Caches, lacking: int) -> None:
            request, _ = requests[id]
            self._stored(request, caches, request.length - lacking)

        logits = at_once(len(group) * max(counts))
        with self._memory.turn(tokens=max(counts), context=longest, rows=len(group), logits=logits):
            rows = [row_start(request, prefill, vocab_size=vocab_size) for request, prefill in group]
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
        self._meter.joined(len(first))
        self._settle(first)
        self._tell()  # nobody waits for the step to see a first token

    def _stored(self, request: Request, caches: Caches, position: int) -> None:
        """The request's tokens have been computed up to `position`."""
        self._prefixes.after_turn(request, caches, position)
        self._following.moved(request, computed=position, stored=self._prefixes.stored(request))
        self._reports.computed(request, min(position, len(request.job.prompt)))

    # -- rows ---------------------------------------------------------------------------------------------------------

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
                    self._end(request, State.FAILED, failure)
                elif reason is not None:
                    self._end(request, State.FINISHED, request.result(reason))
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
        if self._memory.is_spent(request) and request.id in self._places.rows:
            self._preempt(request.id, SHORT_OF_MEMORY)
        elif not self._memory.somebody_leaves:
            rows = [Row(each.id, self._line.defers(each)) for each in [*self._places.rows.values(), *self._prompts]]
            self._preempt(makes_way(rows), SHORT_OF_MEMORY)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _abort(self, command: Abort) -> None:
        request = self._places.find(command.id)
        if request is None:
            return  # it ended before the command came
        self._places.keep(request)
        self._end(request, State.CANCELLED, request.cancelled(command.reason))
        self._places.batch.remove(frozenset({request.id}))

    def _refuse(self, command: Refuse) -> None:
        request = self._places.find(command.id)
        if request is not None:
            self._places.keep(request)
            self._end(request, State.FAILED, command.error)
            self._places.batch.remove(frozenset({request.id}))

    def _end(self, request: Request, state: State, event: Event) -> None:
        request.enter(state)
        self._reports.ended(request, event)
        self._places.forget(request)

    def _recover(self, exc: Exception) -> str | None:
        """Fails the requests that the exception concerns; returns why the engine must end, if it must.

        A row that failed by itself is the only one concerned; a step of the whole batch concerns all of it. Whatever
        was computed in that step cannot be trusted: the batch is made anew, and its other rows come back from the line.
        """
        self._failures += 1
        self._meter.step_failed()
        reason = f"{type(exc).__name__} in a step"
        concerned = [request for request in self._concerned if not request.ended]
        if isinstance(exc, RowFailed):
            reason = f"{type(exc.__cause__).__name__} in its own part of a step"
            concerned = [request for request in self._places.taken if request.id == exc.id]
        log.exception("a step of %s failed; it ends: %s", self._loaded.facts.name, [r.id for r in concerned] or "none")
        for request in concerned:
            self._end(request, State.FAILED, EngineFailed(request.job.model, reason))
        self._places.rebuild(joining=[request for request in self._concerned if not request.ended])
        self._concerned = ()
        if not concerned or self._failures >= MAX_FAILURES or isinstance(exc, InvariantError):
            return f"{reason}, {self._failures} times in a row"
        return None

    def _end_all(self, failure: str | None) -> None:
        for command in self._inbox.take(wait=False):
            if isinstance(command, Submit):
                self._line.add(Request(command.job, self._decoder, self._clock))
        for request in self._places.live:
            if failure is not None:
                self._end(request, State.FAILED, EngineFailed(request.job.model, failure))
            elif self._closing is not None and self._closing.why == "shutdown":
                self._end(request, State.FAILED, ShuttingDown())
            else:
                self._end(request, State.CANCELLED, request.cancelled("model unloaded"))

    def _let_go(self, failure: str | None) -> Closed:
        """Drops the model and everything computed with it; says what came free, or who still has the model."""
        before, accounted = mx.get_active_memory(), self._loaded.facts.weight_bytes + self._memory.held_bytes
        model = weakref.ref(self._loaded.model)
        del self._places, self._loaded, self._prefixes, self._fetching, self._prompts
        gc.collect()
        mx.clear_cache()
        self._memory.close()
        remains = remains_of(model)
        # The difference is that of all engines, and the others go on meanwhile: what is known to be gone needs none.
        freed = max(0, before - mx.get_active_memory())
        if accounted:
            freed = accounted if remains is None else min(freed, accounted)
        return Closed(failure, freed, remains)

    def _tell(self, *, now: bool = False) -> None:
        """Whoever is told of an end finds it counted."""
        self._publish(now=now)
        self._reports.flush()

    def _publish(self, *, now: bool = False) -> None:
        if self._loaded.cache is not None and self._prefixes.cache is None:
            self._uncached = "its cache was inconsistent; loading the model again brings it back"
        self._reports.publish(lambda: self._places.live, now=now)
