"""The limits: which ceiling binds, where the marks stand, and when a level is entered and left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.engine.limits import Ceilings, Level, MemoryPolicy, judge, level_of

GB = 2**30


@pytest.mark.parametrize(
    ("tier", "total", "static"),
    [
        ("safe", 64 * GB, 64 * GB - int(0.4 * 64 * GB)),
        ("balanced", 64 * GB, 48 * GB),
        ("aggressive", 64 * GB, 64 * GB - int(0.1 * 64 * GB)),
        ("balanced", 8 * GB, 4 * GB),  # the reserve of 4 GB
        ("safe", 8 * GB, 4 * GB),  # half of a small machine, though 8 GB are to be left
        ("aggressive", 16 * GB, 14 * GB),
    ],
)
def test_a_tier_leaves_a_share_of_the_machine_to_others(tier: str, total: int, static: int) -> None:
    assert MemoryPolicy(tier).static(total) == static  # type: ignore[arg-type]


def test_a_number_takes_the_tiers_place_and_is_never_more_than_there_is() -> None:
    assert MemoryPolicy("custom", 3 * GB).static(8 * GB) == 3 * GB
    assert MemoryPolicy("custom", 30 * GB).static(8 * GB) == 8 * GB


@pytest.mark.parametrize(
    ("ceilings", "binding"),
    [
        (Ceilings(10, 20, 30), "static"),
        (Ceilings(20, 10, 30), "dynamic"),
        (Ceilings(20, 30, 10), "metal"),
        (Ceilings(10, 20), "static"),
        (Ceilings(20, 10), "dynamic"),
        (Ceilings(10, 10, 10), "static"),
    ],
)
def test_the_lowest_ceiling_binds(ceilings: Ceilings, binding: str) -> None:
    assert ceilings.binding == binding


def test_the_abort_mark_leaves_out_what_other_programs_do() -> None:
    limits = judge(Ceilings(1000, 500, 800), tier="safe", measured=0, ledger=0, before=Level.OK)
    assert (limits.soft, limits.hard, limits.abort) == (450, 480, 784)


@pytest.mark.parametrize(
    ("before", "usage", "after"),
    [
        (Level.OK, 900, Level.OK),
        (Level.OK, 901, Level.SOFT),
        (Level.OK, 961, Level.HARD),  # a jump over both
        (Level.SOFT, 851, Level.SOFT),
        (Level.SOFT, 850, Level.OK),
        (Level.SOFT, 961, Level.HARD),
        (Level.HARD, 921, Level.HARD),
        (Level.HARD, 920, Level.SOFT),  # below its own low mark, above the other's
        (Level.HARD, 850, Level.OK),
    ],
)
def test_a_level_is_entered_at_its_high_mark_and_left_at_its_low_one(before: Level, usage: int, after: Level) -> None:
    assert level_of(usage, 1000, before) is after


@given(st.lists(st.integers(0, 1200), min_size=1))
def test_between_the_marks_a_level_never_changes_back_and_forth(readings: list[int]) -> None:
    level = Level.OK
    for usage in readings:
        after = level_of(usage, 1000, level)
        if after > level:
            assert usage > (960 if after is Level.HARD else 900)
        if after < level:
            assert usage <= (920 if level is Level.HARD else 850)
        level = after


def test_the_use_between_two_readings_moves_with_the_ledger() -> None:
    limits = judge(Ceilings(1000, 1000), tier="safe", measured=600, ledger=400, before=Level.OK)
    assert limits.usage == 600
    assert limits.usage_at(550) == 750  # 150 more than at the reading
    assert limits.usage_at(300) == 500


def test_what_is_reserved_and_not_yet_there_counts_as_used() -> None:
    limits = judge(Ceilings(1000, 1000), tier="safe", measured=300, ledger=700, before=Level.OK)
    assert limits.usage == 700
    assert limits.usage_at(800) == 800
