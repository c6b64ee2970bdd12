"""The scheduler: who gets a row and whose prompt the next turn computes. Decides; carries nothing out.

`admission` and `turn` are pure functions of what the engine sees; they know no arrays, threads or clocks. One step is
at most one prefill turn and one decode of all rows, so that a turn's length is what a running stream may be held up by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Turns smaller than this cost more in starting them than they compute.
MIN_TURN_TOKENS = 8
# Turns are sized for this share of the time allowed: they are decided on, and what they computed is stored, in it too.
AIM = 0.85
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
class Row:
    """A request that has a place: its prompt is being computed, or it decodes. Rows are in the order they came."""

    id: str
    batch_priority: bool


@dataclass(frozen=True, slots=True)
class Admission:
    """How many requests may be admitted, and which row must leave for that."""

    free: int
    preempt: str | None = None


def admission(rows: Sequence[Row], limits: SchedulerLimits, *, interactive_waits: bool) -> Admission:
    """A full batch makes room for an interactive request by preempting the batch request that came last."""
    free = limits.max_batch - len(rows)
    if free > 0 or not interactive_waits:
        return Admission(max(free, 0))
    victim = next((row.id for row in reversed(rows) if row.batch_priority), None)
    return Admission(0) if victim is None else Admission(1, preempt=victim)


def makes_way(rows: Sequence[Row]) -> str:
    """Who leaves when there is not memory enough for all: of the lowest priority the one that came last."""
    return next((row.id for row in reversed(rows) if row.batch_priority), rows[-1].id)


@dataclass(frozen=True, slots=True)
class Rate:
    """Prefill tokens per second: as lately measured, and what even a slow turn reaches."""

    usual: float
    sure: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt under way. `remaining` counts tokens to compute, the last one included, which only the first draw needs.

    `until_stop` counts those before something is to be stored, `remaining` if nothing is. `rate` is that of its own
    turns, None before the first. `last_turn` is the step of its latest turn, -1 before the first.
    One that `warms` is computed and stored, and draws nothing: it never joins the batch. One that is `apart` has
    pictures to come, and joins it once they have been computed. A `heavy` one has so much KV that copying it into one
    cache with others takes longer than a pass for itself.
    """

    id: str
    remaining: int
    until_stop: int
    rate: Rate | None = None
    batch_priority: bool = False
    last_turn: int = -1
    warms: bool = False
    apart: bool = False
    heavy: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """What the engine sees when it decides on a turn. Prompts are in the order they were admitted."""

    decoding: int
    waiting: int
    prompts: Sequence[Prompt]
    rate: Rate | None = None  # of prompts without one of their own
    after_long: bool = False  # the latest turn went to a prompt too long for one turn


@dataclass(frozen=True, slots=True)
class Turn:
    """What this step computes of prompts: `tokens` of `solo`, or all that is left of `join`, which enter the batch.

    With `one_by_one` they enter one after another, as long as others can be kept waiting.
    """

    solo: str | None = None
    tokens: int = 0
    join: Sequence[str] = ()
    one_by_one: bool = False


def turn(view: View, limits: SchedulerLimits) -> Turn:
    """Decides whose prompt is computed."""
    if not view.prompts:
        return Turn()
    alone = view.decoding == 0 and view.waiting == 0 and len(view.prompts) == 1
    budgets = {prompt.id: turn_tokens(prompt.rate or view.rate, limits, alone=alone) for prompt in view.prompts}
    short = [prompt for prompt in view.prompts if _fits(prompt, budgets[prompt.id])]
    long = [prompt for prompt in view.prompts if not _fits(prompt, budgets[prompt.id])]
    # Both kinds take every other turn: a short prompt waits for one turn however many long ones there are, and a
    # stream of short ones cannot starve a long one.
    if short and (view.after_long or not long):
        short.sort(key=lambda prompt: prompt.batch_priority)
        if short[0].heavy:
            return Turn(join=[prompt.id for prompt in short if prompt.heavy], one_by_one=True)
        light = [prompt for prompt in short if not prompt.heavy]
        return Turn(join=[prompt.id for prompt in joiners(light[0], light, budgets)])
    chosen = min(long, key=lambda prompt: (prompt.batch_priority, prompt.last_turn))
    return Turn(solo=chosen.id, tokens=min(budgets[chosen.id], chosen.until_stop, chosen.remaining - 1))


def _fits(prompt: Prompt, budget: int) -> bool:
    """Whether the prompt can enter the batch at once: no more is left than the budget, and no checkpoint on the way."""
    apart = prompt.warms or prompt.apart
    return not apart and prompt.remaining <= budget and prompt.until_stop >= prompt.remaining - 1


def turn_tokens(rate: Rate | None, limits: SchedulerLimits, *, alone: bool) -> int:
    """How many tokens a turn may compute: what the rate allows in the time that others can be kept waiting.

    The bound on a turn that others wait for is on what really happens; one that is alone may last a little longer.
    """
    if rate is None:
        return min(FIRST_TURN_TOKENS, limits.prefill_chunk)
    per_s, allowed_ms = (rate.usual, limits.max_chunk_ms) if alone else (rate.sure, limits.max_decode_stall_ms)
    return max(MIN_TURN_TOKENS, min(int(per_s * AIM * allowed_ms / 1e3), limits.prefill_chunk))


def joiners(first: Prompt, candidates: Sequence[Prompt], budgets: Mapping[str, int]) -> list[Prompt]:
    """The short prompts that enter together with `first`: padded to the longest, they still fit everyone's budget.

    A prompt of one token has nothing to pad and is a group of its own with its like.
    """
    group, longest, budget = [first], first.remaining, budgets[first.id]
    for other in sorted(candidates, key=lambda prompt: prompt.remaining):
        if other.id == first.id or (other.remaining == 1) != (first.remaining == 1):
            continue
        width, allowed = max(longest, other.remaining), min(budget, budgets[other.id])
        if width * (len(group) + 1) > allowed:
            continue
        group.append(other)
        longest, budget = width, allowed
    return group
