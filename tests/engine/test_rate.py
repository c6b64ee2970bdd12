"""The prefill rate: what turns are sized by, and how it takes turns that last longer than foretold."""

from __future__ import annotations

import pytest

from omlxd.engine.rate import MIN_TOKENS, PrefillRate
from omlxd.engine.scheduler import Rate


def after(*elapsed_s: float) -> Rate:
    """The rate after turns of 100 tokens."""
    rate = PrefillRate()
    for seconds in elapsed_s:
        rate.measured(100, seconds)
    read = rate.read()
    assert read is not None
    return read


def test_steady_turns_are_counted_on_whole() -> None:
    rate = after(*[0.1] * 10)
    assert rate.usual == pytest.approx(1000)
    assert rate.sure == pytest.approx(1000)


def test_nothing_is_sure_before_the_first_turn() -> None:
    assert PrefillRate().read() is None


def test_a_turn_too_small_to_tell_is_not_counted() -> None:
    rate = PrefillRate()
    rate.measured(MIN_TOKENS - 1, 0.1)
    assert rate.read() is None


def test_turns_are_sized_so_that_those_that_overrun_end_in_time() -> None:
    """Every fifth turn takes half as long again."""
    rate = after(*[0.1, 0.1, 0.1, 0.1, 0.15] * 20)
    slowest = 100 / 0.15
    assert rate.sure <= slowest * 1.02


def test_a_freak_is_forgotten_within_a_few_turns() -> None:
    rate = after(*[0.1] * 5, 10.0, *[0.1] * 25)
    assert rate.sure == pytest.approx(1000, rel=0.01)


def test_a_context_that_makes_every_token_dearer_is_followed() -> None:
    rate = after(*[0.1 + 0.002 * turn for turn in range(50)])
    assert 0.75 * 500 <= rate.sure <= 1.05 * 500
