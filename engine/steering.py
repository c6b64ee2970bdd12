"""Steering: which tokens one row may say next, where the client has asked for more than sampling.

A `Course` is what was asked, a value made with the job: a budget for the reasoning, a tool that must be called, a
grammar that the answer must follow. `Steering` is its logits processor, one per row, on the engine thread; made from
the answer so far, so that a row that left the batch comes back to where it was. Rows that ask for nothing have none.

A processor is called while the batch's next forward pass is being put together and needs the token that the pass
before has just drawn. It starts the pass first and then waits for that token alone, so that masks are computed on the
host while the device computes the logits they are for: what is longer than the pass is all that other rows see.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import mlx.core as mx
import numpy as np

from omlxd.engine.answer import Answer, Form
from omlxd.engine.channels import State
from omlxd.engine.grammar import Grammar, Mask
from omlxd.engine.rules import Choice, Follow, Forced, Rule, Unless
from omlxd.engine.text import Decoder

LEAST_LOGIT = -3e4  # finite in every floating-point type, and as good as impossible beside any real logit


@dataclass(frozen=True, slots=True)
class Opening:
    """Tokens with which an answer may have to begin, and what follows them: a grammar, and tokens again."""

    token_ids: Sequence[int]
    grammar: Grammar | None = None
    tail: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Course:
    """What one answer is held to.

    At `budget` tokens of reasoning `closing` is forced. What holds for the answer proper, one of the `openings` or the
    `grammar`, does so from the first time it is in state `begins`. Until then the model may say `reasoning` first, the
    token ids that open it; `after_reasoning` is forced once it has closed it by itself. Instead of a text of the
    grammar the model may begin a tool call with the tokens `call`. Before the answer proper no token of `ends` is said.
    """

    form: Form
    vocab_size: int
    budget: int | None = None
    closing: Sequence[int] = ()
    begins: State = State.CONTENT
    openings: Sequence[Opening] = ()
    grammar: Grammar | None = None
    reasoning: Sequence[int] = ()
    after_reasoning: Sequence[int] = ()
    call: Sequence[int] = ()
    ends: frozenset[int] = frozenset()


def _rules(course: Course, *, may_reason: bool = True) -> list[Rule]:
    """What holds from where the answer proper begins."""
    reasoning: list[tuple[Sequence[int], Sequence[Rule]]] = []
    if course.reasoning and may_reason:
        reasoning.append((course.reasoning, _rules(course, may_reason=False)))
    if course.openings:
        return [Choice([*((opening.token_ids, _after(opening)) for opening in course.openings), *reasoning])]
    if course.grammar is None:
        return []
    ways = [*reasoning, *([(course.call, [])] if course.call else [])]
    follow = Follow(course.grammar)
    return [Unless(follow, ways) if ways else follow]


def _after(opening: Opening) -> list[Rule]:
    tail: list[Rule] = [Forced(opening.tail)] if opening.tail else []
    return tail if opening.grammar is None else [Follow(opening.grammar, then=tail)]


class Steering:
    """One row's logits processor. `failure` says why the answer can no longer be held to its course, if so."""

    def __init__(self, course: Course, decoder: Decoder, answer: Sequence[int] = ()) -> None:
        """`answer` is what the row has said already, all of it."""
        self._course = course
        self._answer = Answer(course.form, (), decoder)
        self._rules = _rules(course)
        self._started = False
        self._reasoned = False
        self._forced: Forced | None = None
        self._budget = course.budget
        self._called = False
        self.failure: str | None = None
        self.mask_s = 0.0
        self._moved()
        for token_id in answer:
            self._observe(token_id)

    def __call__(self, newest: mx.array, logits: mx.array) -> mx.array:
        """`newest` (1,) is the row's latest token; the first call's is part of what the row begins with."""
        if self._finished:
            return logits
        if self._called:
            mx.async_eval(logits)  # type: ignore[no-untyped-call]  # the pass goes on while the mask is found
            self._observe(cast("int", newest.item()))
        self._called = True
        began = time.perf_counter()
        allowed = self._allowed()
        self.mask_s += time.perf_counter() - began
        return logits if allowed is None else _only(logits, allowed)

    @property
    def _finished(self) -> bool:
        watches = self._budget is not None and not self._reasoned and not self._answer.text
        return not self._rules and self._forced is None and not watches

    def _allowed(self) -> Mask | frozenset[int] | None:
        if self._forced is not None:
            return self._forced.allowed()
        if not self._rules_hold:
            return self._anything_but_the_end if self._rules else None
        allowed = self._rules[0].allowed()
        self._look_for_failure()
        return allowed

    @cached_property
    def _anything_but_the_end(self) -> Mask:
        mask = np.ones(self._course.vocab_size, dtype=np.bool_)
        mask[list(self._course.ends)] = False
        return mask

    @property
    def _rules_hold(self) -> bool:
        return bool(self._rules) and self._started and self._answer.state is not State.REASONING

    def _observe(self, token_id: int) -> None:
        """The row has said this token."""
        reasoned = self._answer.state is State.REASONING
        forced = self._forced is not None
        if self._forced is not None:
            if self._forced.take(token_id) is not None:
                self._forced = None
        elif self._rules_hold:
            after = self._rules[0].take(token_id)
            if after is not None:
                self._rules[:1] = after
            self._look_for_failure()
        self._answer.add(token_id)
        if reasoned and self._answer.state is not State.REASONING:
            self._left_reasoning(by_itself=not forced)
        self._moved()

    def _left_reasoning(self, *, by_itself: bool) -> None:
        self._reasoned = True
        follow = self._follow
        if follow is not None and self._answer.text:
            follow.matching.take_text(self._answer.text)  # the token that closed the reasoning began the answer, too
        elif by_itself and self._rules and self._course.after_reasoning:
            self._forced = Forced(self._course.after_reasoning)

    def _moved(self) -> None:
        """Looks at where the answer stands now."""
        state = self._answer.state
        if state is self._course.begins:
            self._started = True
        if state is State.REASONING and self._budget is not None and self._answer.reasoning_tokens >= self._budget:
            self._budget = None
            self._forced = Forced(self._course.closing)

    @property
    def _follow(self) -> Follow | None:
        """The grammar that holds, if one does."""
        rule = self._rules[0] if self._rules else None
        if isinstance(rule, Unless):
            return rule.follow
        return rule if isinstance(rule, Follow) else None

    def _look_for_failure(self) -> None:
        follow = self._follow
        if follow is not None:
            self.failure = follow.matching.failure


def _only(logits: mx.array, allowed: Mask | frozenset[int]) -> mx.array:
    """The logits (1, vocabulary) of the allowed tokens, all others impossible.

    Where a bias had made the allowed ones impossible too, they are equally likely: one of them must come.
    """
    if isinstance(allowed, frozenset):
        mask = np.zeros(logits.shape[-1], dtype=np.bool_)
        mask[list(allowed)] = True
    else:
        mask = allowed
    return mx.where(mx.array(mask), mx.maximum(logits, LEAST_LOGIT), -mx.inf)
