"""One request inside its engine: its state, its tokens so far, its text and its times.

Made on the event loop, owned by the engine thread from the moment it is submitted. The states and the moves between
them stand in one table; `enter` is the only way to change them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from omlxd.cache.keys import MediaSpan, apart
from omlxd.engine.answer import Answer, Part
from omlxd.engine.api import (
    Cancelled,
    Delta,
    FinishReason,
    GenerationResult,
    InvalidGrammar,
    InvariantError,
    OmlxError,
    PromptPicture,
    RequestInfo,
    Timings,
    TokenLogprob,
    Usage,
)
from omlxd.engine.job import Job
from omlxd.engine.steering import Steering
from omlxd.engine.text import Decoder

Clock = Callable[[], float]


class State(enum.Enum):
    """Where a request is on its way (DESIGN.md section 3)."""

    QUEUED = "QUEUED"
    HELD = "HELD"
    FETCHING = "FETCHING"
    PREFILL = "PREFILL"
    DECODE = "DECODE"
    FINISHED = "FINISHED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


ENDS = frozenset({State.FINISHED, State.CANCELLED, State.FAILED})
_WAITING = frozenset({State.QUEUED, State.HELD})
_NEXT: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.FETCHING, State.PREFILL, State.HELD}),
    State.HELD: frozenset({State.QUEUED}),
    State.FETCHING: frozenset({State.PREFILL, State.QUEUED}),
    State.PREFILL: frozenset({State.DECODE, State.HELD, State.QUEUED}),
    State.DECODE: frozenset({State.HELD, State.QUEUED}),
}


WAITS = "waits for a row"  # the reason of whoever is QUEUED and has no better one


class Request:
    """A job on its way through the engine."""

    def __init__(self, job: Job, decoder: Decoder, clock: Clock) -> None:
        self.job = job
        self.state = State.QUEUED
        self.reason: str | None = WAITS
        self.computed = 0  # prompt tokens whose KV exists, cached ones included
        self.cached = 0
        self.token_ids: list[int] = []
        self.drawn: list[int] = []  # every token drawn, the id that ended the answer included: what the KV cache holds
        self.logprobs: list[TokenLogprob] = []
        self._clock = clock
        self._decoder = decoder
        self._answer = Answer(job.form, job.stop, decoder)
        self._steering: Steering | None = None
        self._mask_s = 0.0
        self.submitted = clock()
        self.waits_since = self.submitted  # for a row, unless it has one
        self.started: float | None = None
        self._first_token: float | None = None
        self._fetch_began = 0.0
        self._fetch_s = 0.0  # reading from disk, in all
        self._fetched_s = 0.0  # of which before it first had a row

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer so far: what a row that comes back must have computed."""
        return [*self.job.prompt, *self.drawn]

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        """What its blocks' keys are made of besides tokens: which of them stand for which pictures, in order."""
        return (*apart(self.job.apart), *(picture.span for picture in self.job.pictures))

    @property
    def length(self) -> int:
        return len(self.job.prompt) + len(self.drawn)

    @property
    def ended(self) -> bool:
        return self.state in ENDS

    def enter(self, state: State, reason: str | None = None) -> None:
        """Moves on. Raises InvariantError for a move that the table does not allow."""
        if self.state in ENDS or state not in _NEXT[self.state] | ENDS:
            raise InvariantError(f"request {self.id}: {self.state.name} -> {state.name}")
        if self.state is State.FETCHING:
            self._fetch_s += self._clock() - self._fetch_began
        if state is State.FETCHING:
            self._fetch_began = self._clock()
        if state is State.PREFILL and self.started is None:
            self.started = self._clock()
            self._fetched_s = self._fetch_s
        if state in _WAITING and self.state not in _WAITING:
            self.waits_since = self._clock()
        self.state = state
        self.reason = WAITS if state is State.QUEUED and reason is None else reason

    def steer(self) -> list[Steering]:
        """What holds a row that takes the answer up where it is to its course; nothing for a plain request."""
        if self.job.course is None:
            return []
        self._mask_s = self._mask_total_s
        self._steering = Steering(self.job.course, self._decoder, self.drawn)
        return [self._steering]

    @property
    def failure(self) -> OmlxError | None:
        """Why the answer can go no further, if it cannot be held to its course any more."""
        failed = self._steering.failure if self._steering is not None else None
        return None if failed is None else InvalidGrammar(f"it became too complex while the answer grew: {failed}")

    @property
    def _mask_total_s(self) -> float:
        return self._mask_s + (self._steering.mask_s if self._steering is not None else 0.0)

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> tuple[list[Delta], FinishReason | None]:
        """Takes the next token; returns what may be sent now and, at the end, why it ended."""
        if self._first_token is None:
            self._first_token = self._clock()
        self.drawn.append(token_id)
        answer = self._answer
        if token_id in self.job.stop_ids:
            parts = answer.finish(token_id)
            return self._deltas(parts, [], []), "tool_calls" if answer.calls else "stop"
        self.token_ids.append(token_id)
        added = [] if logprob is None else [logprob]
        self.logprobs.extend(added)
        parts = answer.add(token_id)
        reason: FinishReason | None = "stop" if answer.stopped else None
        if reason is None and len(self.token_ids) >= self.job.max_tokens:
            parts += answer.finish()
            reason = "stop" if answer.stopped else "length"
        return self._deltas(parts, [token_id], added), reason

    def _deltas(self, parts: list[Part], token_ids: list[int], logprobs: list[TokenLogprob]) -> list[Delta]:
        """The parts as events, where they are wanted; the last one carries the token."""
        if not self.job.stream:
            return []
        if not parts:
            return [Delta("", self._answer.channel, token_ids, logprobs)] if token_ids else []
        deltas = [Delta(text, channel) for channel, text in parts[:-1]]
        channel, text = parts[-1]
        return [*deltas, Delta(text, channel, token_ids, logprobs)]

    def result(self, reason: FinishReason) -> GenerationResult:
        """The whole answer, or what there is of it."""
        answer = self._answer
        return GenerationResult(
            model=self.job.model,
            text=answer.text,
            finish_reason=reason,
            usage=Usage(len(self.job.prompt), self.cached, len(self.token_ids), answer.reasoning_tokens),
            timings=self._timings(),
            seed=self.job.sampling.seed,
            reasoning=answer.reasoning,
            tool_calls=answer.calls or None,
            malformed_calls=answer.malformed,
            token_ids=self.token_ids,
            prompt_token_ids=self.job.prompt,
            prompt_pictures=[PromptPicture(x.span.start, x.span.stop, x.span.digest) for x in self.job.pictures],
            logprobs=self.logprobs if self.job.logprobs else None,
        )

    def cancelled(self, reason: str | None) -> Cancelled:
        """The error that tells the client of a cancellation, with the answer so far."""
        return Cancelled(self.result("cancelled"), reason)

    def _timings(self) -> Timings:
        now = self._clock()
        started = self.started if self.started is not None else now
        first = self._first_token if self._first_token is not None else now
        decode_s = now - first
        more = len(self.token_ids) - 1
        return Timings(
            queue_ms=(started - self.job.arrived - self._fetched_s) * 1e3,
            fetch_ms=self._fetch_s * 1e3,
            prefill_ms=(first - started) * 1e3,
            ttft_ms=(first - self.job.arrived) * 1e3,
            decode_ms=decode_s * 1e3,
            mask_ms=self._mask_total_s * 1e3,
            tokens_per_s=more / decode_s if more > 0 and decode_s > 0 else 0.0,
        )

    def info(self) -> RequestInfo:
        return RequestInfo(
            id=self.id,
            model=self.job.model,
            state=self.state.name,
            prompt_tokens=len(self.job.prompt),
            computed_tokens=self.computed,
            completion_tokens=len(self.token_ids),
            age_s=self._clock() - self.job.arrived,
            reason=self.reason,
            priority="batch" if self.job.batch_priority else "interactive",
        )
