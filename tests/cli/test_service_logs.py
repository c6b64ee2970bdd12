"""`omlxctl service logs`, which needs neither a daemon nor a launchd."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cli.running import Home


@pytest.fixture
def log(home: Home) -> Path:
    (home.path / "logs").mkdir(parents=True)
    log = home.path / "logs" / "omlxd.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    return log


def test_it_prints_the_last_lines(home: Home, log: Path) -> None:
    assert home.run("service", "logs").text.splitlines()[0] == "line 50"
    assert home.run("service", "logs", "-n", "2").text == "line 98\nline 99\n"


def test_with_json_it_is_one_document(home: Home, log: Path) -> None:
    assert home.run("service", "logs", "-n", "1", "--json").document == {"path": str(log), "lines": ["line 99"]}
    assert home.run("service", "logs", "-f", "--json").code == 2


def test_without_a_log_it_says_where_it_would_be(home: Home) -> None:
    outcome = home.run("service", "logs")
    assert (outcome.code, f"no log at {home.path}/logs/omlxd.log" in outcome.errors[0]) == (1, True)


def test_followed_it_goes_on_across_a_rotation_until_it_is_interrupted(home: Home, log: Path) -> None:
    with home.start("service", "logs", "-f", "-n", "1") as following:
        assert following.stdout is not None
        assert following.stdout.readline() == b"line 99\n"
        log.rename(log.with_name("omlxd.log.1"))
        log.write_text("after\n")
        assert following.stdout.readline() == b"after\n"
        following.send_signal(signal.SIGINT)
        assert following.wait(30) == 130


def test_a_reader_that_leaves_ends_it_silently(home: Home, log: Path) -> None:
    reading, writing = os.pipe()
    with home.start("service", "logs", "-f", stdout=writing) as following:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        with log.open("a") as file:
            file.write("more\n")
        assert following.stderr is not None
        assert (following.wait(30), following.stderr.read()) == (141, b"")
