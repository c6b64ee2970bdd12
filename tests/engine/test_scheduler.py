"""What a step does, decided from values alone."""

from __future__ import annotations

from omlxd.engine.scheduler import FIRST_TURN_TOKENS, Plan, SchedulerLimits, View, Waiting, plan, turn_tokens

LIMITS = SchedulerLimits(max_batch=4, prefill_chunk=2048, max_decode_stall_ms=80, max_chunk_ms=250)
RATE = 1000.0  # tokens per second: 80 tokens a turn while others wait, 250 alone


def view(*waiting: Waiting, decoding: int = 0, after_long: bool = False, rate: float | None = RATE) -> View:
    return View(decoding=decoding, waiting=waiting, rate=rate, after_long=after_long)


def test_nothing_waiting_is_nothing_to_do() -> None:
    assert plan(view(decoding=3), LIMITS) == Plan()


def test_a_short_prompt_enters_the_batch_whole() -> None:
    assert plan(view(Waiting("a", 80)), LIMITS) == Plan(["a"], join=["a"])


def test_a_long_prompt_gets_a_turn_as_long_as_others_can_wait() -> None:
    assert plan(view(Waiting("a", 900)), LIMITS) == Plan(["a"], solo="a", tokens=250)
    assert plan(view(Waiting("a", 900), decoding=1), LIMITS) == Plan(["a"], solo="a", tokens=80)


def test_the_last_token_is_left_for_the_first_draw() -> None:
    assert plan(view(Waiting("a", 251)), LIMITS).tokens == 250
    assert plan(view(Waiting("a", 250)), LIMITS).join == ["a"]


def test_turns_are_never_over_the_chunk_and_start_small() -> None:
    assert turn_tokens(1e6, LIMITS, alone=True) == 2048
    assert turn_tokens(None, LIMITS, alone=True) == FIRST_TURN_TOKENS
    assert turn_tokens(1.0, LIMITS, alone=False) == 16


def test_short_prompts_enter_together_and_are_padded_only_to_each_other() -> None:
    decided = plan(view(Waiting("a", 20), Waiting("b", 25), Waiting("c", 70), decoding=1), LIMITS)
    assert decided.join == ["a", "b"]  # with c, three rows of 70 would not fit into 80


def test_a_short_prompt_waits_for_one_turn_of_a_long_one_however_many_there_are() -> None:
    long = [Waiting(f"l{n}", 5000, admitted=True, last_turn=n) for n in range(2)]
    short = Waiting("s", 30)
    assert plan(view(*long, short, after_long=True), LIMITS).join == ["s"]
    assert plan(view(*long, short, after_long=False), LIMITS).solo == "l0"


def test_long_prompts_take_turns() -> None:
    first, second = Waiting("a", 5000, admitted=True, last_turn=8), Waiting("b", 5000, admitted=True, last_turn=7)
    assert plan(view(first, second, after_long=True), LIMITS).solo == "b"


def test_no_more_are_admitted_than_there_are_rows() -> None:
    waiting = [Waiting(str(n), 10) for n in range(5)]
    assert plan(view(*waiting, decoding=2), LIMITS).admit == ["0", "1"]
    assert plan(view(Waiting("p", 500, admitted=True), *waiting, decoding=3), LIMITS).admit == []


def test_interactive_requests_are_admitted_before_batch_ones() -> None:
    waiting = [Waiting("b", 10, batch_priority=True), Waiting("i", 10)]
    assert plan(view(*waiting, decoding=3), LIMITS).admit == ["i"]


def test_prompts_of_one_token_form_a_group_of_their_own() -> None:
    decided = plan(view(Waiting("a", 1), Waiting("b", 1), Waiting("c", 9)), LIMITS)
    assert decided.join == ["a", "b"]
