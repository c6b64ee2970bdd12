"""The scheduler: which requests are admitted and whose prompt the next turn computes. Decides; carries nothing out.

`plan` is a pure function from what the engine sees to what it does in this step; it knows no arrays, threads or
clocks. One step is at most one prefill turn and one decode of all rows, so that a turn's length is what a running
stream may be held up by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Turns smaller than this cost more in starting them than they compute.
MIN_TURN_TOKENS = 16
# The first turn of a model, before any rate has been measured.
FIRST_TURN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The engine's settings: rows at once, requests waiting, and how long and how large a prefill turn may be."""

    max_batch: int = 32
    max_queue: int = 256
    prefill_chunk: int = 2048
    max_decode_stall_ms: float = 80.0
    max_chunk_ms: float = 250.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that is not decoding yet. `remaining` counts prompt tokens not computed, the last one included.

    `batch_priority` is false for a batch request that has waited long enough to be treated like an interactive one.
    """

    id: str
    remaining: int
    batch_priority: bool = False
    admitted: bool = False
    last_turn: int = -1  # the step of its latest prefill turn; -1 before the first


@dataclass(frozen=True, slots=True)
class View:
    """What the engine sees at the beginning of a step. `waiting` is in order of arrival."""

    decoding: int
    waiting: Sequence[Waiting]
    rate: float | None = None  # prefill tokens per second, as lately measured
    after_long: bool = False  # the latest turn went to a prompt too long for one turn


@dataclass(frozen=True, slots=True)
class Plan:
    """What this step does: `admit` these; prefill `tokens` of `solo`, or let all of `join` enter the batch whole."""

    admit: Sequence[str] = ()
    solo: str | None = None
    tokens: int = 0
    join: Sequence[str] = ()


def plan(view: View, limits: SchedulerLimits) -> Plan:
    """Decides one step."""
    admitted = [request for request in view.waiting if request.admitted]
    free = limits.max_batch - view.decoding - len(admitted)
    newcomers = sorted((w for w in view.waiting if not w.admitted), key=lambda w: w.batch_priority)[: max(free, 0)]
    candidates = [*admitted, *newcomers]
    admit = [request.id for request in newcomers]
    if not candidates:
        return Plan()
    alone = view.decoding == 0 and len(view.waiting) == 1
    budget = turn_tokens(view.rate, limits, alone=alone)
    short = [request for request in candidates if request.remaining <= budget]
    long = [request for request in candidates if request.remaining > budget]
    # Both kinds take every other turn: a short prompt waits for one turn however many long ones there are, and a
    # stream of short ones cannot starve a long one.
    if short and (view.after_long or not long):
        first = min(short, key=lambda w: w.batch_priority)
        return Plan(admit, join=[request.id for request in joiners(first, short, budget)])
    chosen = min(long, key=lambda w: (w.batch_priority, w.last_turn))
    return Plan(admit, solo=chosen.id, tokens=min(budget, chosen.remaining - 1))


def turn_tokens(rate: float | None, limits: SchedulerLimits, *, alone: bool) -> int:
    """How many tokens a turn may compute: what the rate allows in the time that others can be kept waiting."""
    if rate is None:
        return min(FIRST_TURN_TOKENS, limits.prefill_chunk)
    allowed_ms = limits.max_chunk_ms if alone else limits.max_decode_stall_ms
    return max(MIN_TURN_TOKENS, min(int(rate * allowed_ms / 1e3), limits.prefill_chunk))


def joiners(first: Waiting, candidates: Sequence[Waiting], budget: int) -> list[Waiting]:
    """The short prompts that enter together with `first`: padded to the longest, they still fit the turn's budget.

    A prompt of one token has nothing to pad and is a group of its own with its like.
    """
    group, longest = [first], first.remaining
    for other in sorted(candidates, key=lambda w: w.remaining):
        if other.id == first.id or (other.remaining == 1) != (first.remaining == 1):
            continue
        width = max(longest, other.remaining)
        if width * (len(group) + 1) > budget:
            continue
        group.append(other)
        longest = width
    return group
