"""`memory`, `pin`, `unpin`, `rm` and `top`, each as its own process against a real wire."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from omlxd.cli.frame import ALARM, GOOD, WARN, bar, frame
from omlxd.engine.api import DaemonStatus, RequestInfo
from tests.cli.running import Home, Terminal
from tests.cli.serving import Daemon, serving
from tests.fakes import FakeBackend, entry, memory_status


class Working(FakeBackend):
    """Has a model in memory and a request under way, a hundred tokens further at each reading."""

    reads = 0

    def status(self) -> DaemonStatus:
        self.reads += 1
        model = replace(entry("tiny"), state="BUSY", requests=1, pinned=True)
        request = RequestInfo("r7", "tiny", "DECODE", 900, 900, 100 * self.reads, 75.0)
        base = super().status()
        return replace(
            base,
            info=replace(base.info, uptime_s=10.0 + self.reads),
            counts={"live": 1, "finished": 3},
            models=[model, entry("other")],
            requests=[request],
            memory=asdict(memory_status(75 * 10**9, "balanced")),
            cache={"enabled": True, "bytes": {"hot": 98e6, "ssd": 0}, "max_bytes": {"hot": 196e6, "ssd": 0}},
        )


@pytest.fixture
def daemon(home: Home) -> Iterator[Daemon]:
    with serving(home, Working()) as running:
        yield running


def test_memory_shows_who_holds_it_and_what_limits_it(home: Home, daemon: Daemon) -> None:
    lines = home.run("memory").text.splitlines()
    assert lines[:4] == [
        "used       8.3 GB, 50 MB of it kept by MLX for reuse",
        "named      8.2 GB, 50 MB is in no entry",
        "level      ok; admits up to 67.5 GB, presses from 72.0 GB",
        "ceilings   static 75.0 GB (balanced), dynamic 90.0 GB; static binds",
    ]
    assert "tiny    weights  8.0 GB" in lines
    assert lines[-1].endswith("no request is admitted  90 bytes used")
    assert home.run("memory", "--json").document["binding"] == "static"


@pytest.mark.parametrize(
    ("word", "tier", "static"),
    [("safe", "safe", 75 * 10**9), ("20GB", "custom", 20 * 2**30), ("4096000000", "custom", 4_096_000_000)],
)
def test_memory_set_takes_a_tier_or_a_size(home: Home, daemon: Daemon, word: str, tier: str, static: int) -> None:
    document = home.run("memory", "set", word, "--json").document
    assert (document["tier"], document["ceilings"]["static"]) == (tier, static)


@pytest.mark.parametrize("words", [["set"], ["set", "much"], ["set", "-1"], ["get", "1GB"]])
def test_memory_set_refuses_what_is_neither(home: Home, daemon: Daemon, words: list[str]) -> None:
    assert home.run("memory", *words).code == 2


def test_pin_and_unpin_say_what_they_did(home: Home, daemon: Daemon) -> None:
    assert home.run("pin", "tiny").text == "pinned tiny\n"
    assert daemon.backend.models["tiny"].pinned
    assert home.run("unpin", "tiny").text == "unpinned tiny\n"
    assert not daemon.backend.models["tiny"].pinned
    assert home.run("pin", "tinny").errors == ["error: no model 'tinny'; did you mean tiny?"]


def test_rm_deletes_a_model(home: Home, daemon: Daemon) -> None:
    assert home.run("rm", "tiny").text == "removed tiny, 1 kB freed\n"
    assert daemon.backend.models == {}
    assert home.run("rm", "tiny").code == 1


def test_top_without_a_terminal_prints_one_reading(home: Home, daemon: Daemon) -> None:
    text = home.run("top").text
    assert "\x1b" not in text
    assert "r7       tiny   decode  900/900  100" in text
    assert home.run("top", "--json").document["requests"][0]["id"] == "r7"
    assert home.run("top", "--every", "0").code == 2


def test_top_draws_on_another_screen_until_q(home: Home, daemon: Daemon) -> None:
    terminal = Terminal(home, "top", "--every", "0.1")
    terminal.wait_for(b"\x1b[?1049h")
    terminal.wait_for(b"tiny")
    terminal.wait_for(b"300")  # the third reading
    terminal.type(b"q")
    assert terminal.end() == 0
    assert terminal.seen.endswith(b"\x1b[?25h\x1b[?1049l")
    terminal.close()


def test_top_leaves_the_screen_as_it_was_on_ctrl_c(home: Home, daemon: Daemon) -> None:
    terminal = Terminal(home, "top", "--every", "0.1")
    terminal.wait_for(b"tiny")
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert b"\x1b[?25h\x1b[?1049l" in terminal.seen
    terminal.close()


def reading(**changes: Any) -> dict[str, Any]:
    status = asdict(Working().status())
    return {**status, **changes}


def texts(
    now: dict[str, Any], before: dict[str, Any] | None = None, *, at: float = 0, columns: int = 200, rows: int = 50
) -> list[str]:
    return [text for text, _ in frame(now, before, at=at, columns=columns, rows=rows)]


def test_rates_are_tokens_since_the_reading_before() -> None:
    backend = Working()
    first, second = asdict(backend.status()), asdict(backend.status())
    assert " - " in next(line for line in texts(first) if line.startswith("r7"))
    drawn = texts(second, first)
    assert "  100  " in next(line for line in drawn if line.startswith("r7"))
    assert next(line for line in drawn if line.startswith("tiny")).split() == [
        *("tiny", "busy,", "pinned", "8.0", "GB", "1", "100", "-")
    ]


def test_a_frame_fits_the_terminal_and_counts_what_it_leaves_out() -> None:
    many = [{**reading()["requests"][0], "id": f"r{n}"} for n in range(100)]
    lines = texts(reading(requests=many), columns=40, rows=24)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 40
    assert lines[-1].startswith("and ")
    shown = sum(line.startswith("r") for line in lines)
    assert lines[-1] == f"and {100 - shown} more"


def test_memory_and_tiers_are_drawn_against_their_ceilings() -> None:
    lines = texts(reading())
    assert f"memory  {bar(8.25e9, 75e9, [67.5e9, 72e9])} 8.2 GB of 75.0 GB, static binds, ok" in lines
    assert "        admits up to 67.5 GB, presses from 72.0 GB; static 75.0 GB, dynamic 90.0 GB" in lines
    assert "        weights 8.0 GB, process 200 MB, no entry 50 MB, free in MLX's pool 50 MB" in lines
    assert f"hot     {bar(1, 2)} 98 MB of 196 MB" in lines
    assert not any(line.startswith("ssd") for line in lines)
    assert bar(1, 2) == "[" + "#" * 15 + "." * 15 + "]"
    assert bar(1, 2, [1.8, 0.5]) == "[" + "#" * 15 + "." * 12 + "|.." + "]"  # what is reached has no mark any more


def test_the_last_action_shows_while_the_pressure_lasts() -> None:
    pressed = {**asdict(memory_status(75 * 10**9, "safe")), "level": "HARD"}
    assert ("        no request is admitted", WARN) in frame(reading(memory=pressed), None, at=0, columns=200, rows=50)


@pytest.mark.parametrize(("level", "look"), [("OK", GOOD), ("SOFT", WARN), ("HARD", ALARM)])
def test_the_level_shows_in_how_memory_looks(level: str, look: str) -> None:
    memory = {**asdict(memory_status(75 * 10**9, "safe")), "level": level}
    (line,) = (line for line in frame(reading(memory=memory), None, at=0, columns=200, rows=50) if "memory" in line[0])
    assert line[1] == look


def test_what_of_the_prompts_was_stored_and_how_the_disk_is_stand_beside_their_tiers() -> None:
    disk = {"state": "paused", "degraded": True, "reason": "it is full", "queued_bytes": 2e6, "counts": {}}
    numbers = {"bytes": {"hot": 98e6, "ssd": 1e9}, "max_bytes": {"hot": 196e6, "ssd": 4e9}}
    cache = {"enabled": True, **numbers, "prompt_tokens": 4000, "cached_tokens": 3000, "ssd": disk}
    lines = texts(reading(cache=cache))
    assert f"hot     {bar(1, 2)} 98 MB of 196 MB; 75 % of 4000 prompt tokens came from the cache" in lines
    assert f"ssd     {bar(1, 4)} 1.0 GB of 4.0 GB; paused: it is full; 2 MB to be written" in lines


def test_an_idle_model_says_since_when_and_when_it_will_go() -> None:
    idle = {**asdict(entry("tiny")), "state": "READY", "requests": 0, "last_used": 1000.0, "ttl_s": 300.0}
    (line,) = (line for line in texts(reading(models=[idle]), at=1042.0) if line.startswith("tiny"))
    assert line.endswith("42s of 5m 0s")
    (line,) = (line for line in texts(reading(models=[{**idle, "ttl_s": None}]), at=1042.0) if line.startswith("tiny"))
    assert line.endswith("42s")
