"""What a step does, decided from values alone."""

from __future__ import annotations

from omlxd.engine.scheduler import (
    AIM,
    FIRST_TURN_TOKENS,
    MIN_TURN_TOKENS,
    Admission,
    Prompt,
    Rate,
    Row,
    SchedulerLimits,
    Turn,
    View,
    admission,
    makes_way,
    turn,
    turn_tokens,
)

LIMITS = SchedulerLimits(max_batch=4, prefill_chunk=2048, max_decode_stall_ms=80, max_chunk_ms=250)
PER_S = 1000.0 / AIM + 1e-6  # tokens per second, of which AIM counts: 80 a turn while others wait, 250 alone
RATE = Rate(PER_S, PER_S)


def prompt(id: str, remaining: int, until_stop: int | None = None, **others: int | bool) -> Prompt:
    return Prompt(id, remaining, remaining if until_stop is None else until_stop, **others)  # type: ignore[arg-type]


def view(*prompts: Prompt, decoding: int = 0, waiting: int = 0, after_long: bool = False) -> View:
    return View(decoding=decoding, waiting=waiting, prompts=prompts, rate=RATE, after_long=after_long)


# -- rows -------------------------------------------------------------------------------------------------------------


def rows(*kinds: str) -> list[Row]:
    return [Row(f"{kind}{n}", kind == "b") for n, kind in enumerate(kinds)]


def test_as_many_are_admitted_as_there_are_free_rows() -> None:
    assert admission(rows("i", "b"), LIMITS, interactive_waits=True) == Admission(2)
    assert admission(rows(*"iiii"), LIMITS, interactive_waits=True) == Admission(0)


def test_a_waiting_interactive_request_preempts_the_batch_request_that_came_last() -> None:
    assert admission(rows(*"bibi"), LIMITS, interactive_waits=True) == Admission(1, preempt="b2")
    assert admission(rows(*"bibi"), LIMITS, interactive_waits=False) == Admission(0)


def test_who_came_last_makes_way_and_a_batch_request_before_any_other() -> None:
    assert makes_way(rows(*"ibib")) == "b3"
    assert makes_way(rows(*"bii")) == "b0"
    assert makes_way(rows(*"ii")) == "i1"


# -- turns ------------------------------------------------------------------------------------------------------------


def test_without_prompts_there_is_no_turn() -> None:
    assert turn(view(decoding=3), LIMITS) == Turn()


def test_a_short_prompt_enters_the_batch_whole() -> None:
    assert turn(view(prompt("a", 80), decoding=1), LIMITS) == Turn(join=["a"])


def test_a_long_prompt_gets_a_turn_as_long_as_others_can_wait() -> None:
    assert turn(view(prompt("a", 900)), LIMITS) == Turn(solo="a", tokens=250)
    assert turn(view(prompt("a", 900), decoding=1), LIMITS) == Turn(solo="a", tokens=80)
    assert turn(view(prompt("a", 900), waiting=1), LIMITS) == Turn(solo="a", tokens=80)


def test_the_last_token_is_left_for_the_first_draw() -> None:
    assert turn(view(prompt("a", 251)), LIMITS).tokens == 250
    assert turn(view(prompt("a", 250)), LIMITS).join == ["a"]


def test_a_turn_ends_where_a_checkpoint_is_due() -> None:
    assert turn(view(prompt("a", 900, until_stop=100)), LIMITS) == Turn(solo="a", tokens=100)
    assert turn(view(prompt("a", 200, until_stop=100)), LIMITS) == Turn(solo="a", tokens=100)


def test_turns_are_never_over_the_chunk_and_start_small() -> None:
    assert turn_tokens(Rate(1e6, 1e6), LIMITS, alone=True) == 2048
    assert turn_tokens(None, LIMITS, alone=True) == FIRST_TURN_TOKENS
    assert turn_tokens(Rate(1.0, 1.0), LIMITS, alone=False) == MIN_TURN_TOKENS


def test_short_prompts_enter_together_and_are_padded_only_to_each_other() -> None:
    decided = turn(view(prompt("a", 20), prompt("b", 25), prompt("c", 70), decoding=1), LIMITS)
    assert decided.join == ["a", "b"]  # with c, three rows of 70 would not fit into 80


def test_a_short_prompt_waits_for_one_turn_of_a_long_one_however_many_there_are() -> None:
    long = [prompt(f"l{n}", 5000, last_turn=n) for n in range(2)]
    short = prompt("s", 30)
    assert turn(view(*long, short, after_long=True), LIMITS).join == ["s"]
    assert turn(view(*long, short, after_long=False), LIMITS).solo == "l0"


def test_a_prompt_that_is_slower_than_others_gets_shorter_turns() -> None:
    slow = Prompt("slow", 5000, 5000, rate=Rate(PER_S, PER_S / 5))
    assert turn(view(slow, decoding=1), LIMITS) == Turn(solo="slow", tokens=16)
    assert turn(view(prompt("fast", 5000), decoding=1), LIMITS).tokens == 80


def test_long_prompts_take_turns() -> None:
    decided = turn(view(prompt("a", 5000, last_turn=8), prompt("b", 5000, last_turn=7), after_long=True), LIMITS)
    assert decided.solo == "b"


def test_prompts_of_one_token_form_a_group_of_their_own() -> None:
    assert turn(view(prompt("a", 1), prompt("b", 1), prompt("c", 9)), LIMITS).join == ["a", "b"]


def test_prompts_with_much_kv_enter_one_by_one_and_those_without_together() -> None:
    heavy = [prompt("a", 9, heavy=True, batch_priority=True), prompt("b", 9, heavy=True), prompt("c", 1, heavy=True)]
    light = [prompt("d", 9), prompt("e", 8)]
    assert turn(view(*heavy, *light), LIMITS) == Turn(join=["b", "c", "a"], one_by_one=True)
    assert turn(view(*light, *heavy), LIMITS) == Turn(join=["d", "e"])
    assert turn(view(prompt("long", 5000, heavy=True)), LIMITS) == Turn(solo="long", tokens=250)
