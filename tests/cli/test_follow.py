"""A log that is rotated while it is followed: every line comes, and comes once."""

from __future__ import annotations

import logging.handlers
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlxd.cli.follow import Follower


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "omlxd.log"


@pytest.fixture
def follower(log: Path) -> Iterator[Follower]:
    with Follower(str(log)) as follower:
        yield follower


def rotate(log: Path, keep: int = 5) -> None:
    """As logging's handler does it: each part gets the next number, the oldest goes."""
    for number in range(keep, 0, -1):
        older = log if number == 1 else log.with_name(f"{log.name}.{number - 1}")
        if older.exists():
            older.replace(log.with_name(f"{log.name}.{number}"))


def append(log: Path, text: str) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(text)


def test_the_tail_is_the_last_lines_and_more_is_what_comes_after(log: Path, follower: Follower) -> None:
    append(log, "".join(f"line {number} {'x' * 500}\n" for number in range(1000)))
    assert [line.split()[1] for line in follower.tail(3)] == ["997", "998", "999"]
    assert follower.more() == ""
    append(log, "new\n")
    assert follower.more() == "new\n"


@pytest.mark.parametrize(("lines", "shown"), [(0, []), (2, ["a", "b"]), (9, ["a", "b"])])
def test_a_tail_may_be_nothing_or_everything(log: Path, follower: Follower, lines: int, shown: list[str]) -> None:
    append(log, "a\nb\n")
    assert list(follower.tail(lines)) == shown


def test_what_was_written_around_a_rotation_comes_whole(log: Path, follower: Follower) -> None:
    append(log, "0\n")
    follower.tail(1)
    append(log, "1\n")
    rotate(log)
    append(log, "2\n")
    assert follower.more() == "1\n2\n"
    append(log, "3\n")
    assert follower.more() == "3\n"


def test_several_rotations_between_two_looks_lose_nothing(log: Path, follower: Follower) -> None:
    append(log, "0\n")
    follower.tail(1)
    for number in range(1, 5):
        append(log, f"{number}\n")
        rotate(log)
    append(log, "5\n")
    assert follower.more() == "1\n2\n3\n4\n5\n"


def test_where_more_was_rotated_away_than_is_kept_it_goes_on_with_what_is_left(log: Path, follower: Follower) -> None:
    append(log, "0\n")
    follower.tail(1)
    os.utime(log, (1, 1))
    for number in range(1, 6):
        rotate(log, keep=2)
        append(log, f"{number}\n")
    assert follower.more() == "3\n4\n5\n"


def test_a_log_that_is_not_there_yet_is_followed_from_its_beginning(log: Path, follower: Follower) -> None:
    assert list(follower.tail(5)) == []
    assert follower.more() == ""
    append(log, "first\n")
    assert follower.more() == "first\n"


def test_a_log_that_was_emptied_goes_on_from_its_new_beginning(log: Path, follower: Follower) -> None:
    append(log, "long ago\n")
    follower.tail(1)
    log.write_text("a\n")
    assert follower.more() == "a\n"


def test_a_character_in_two_halves_is_one_character(log: Path, follower: Follower) -> None:
    append(log, "x")
    follower.tail(0)
    halves = "é".encode()
    for half, shown in ((halves[:1], ""), (halves[1:], "é")):
        with log.open("ab") as file:
            file.write(half)
        assert follower.more() == shown


def test_the_daemons_own_handler_is_followed_line_by_line(log: Path, follower: Follower) -> None:
    handler = logging.handlers.RotatingFileHandler(log, maxBytes=200, backupCount=3)
    follower.tail(0)
    seen = ""
    for number in range(300):
        handler.emit(logging.LogRecord("x", logging.INFO, "", 0, f"line {number}", None, None))
        if number % 7 == 0:
            seen += follower.more()
    handler.close()
    seen += follower.more()
    assert seen.split("\n")[:-1] == [f"line {number}" for number in range(300)]
