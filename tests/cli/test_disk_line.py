"""The tier on disk in one line: what it holds, how it is, what waits, and what was lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from omlxd.cli.disk_line import disk_line
from omlxd.engine.api import DaemonStatus
from tests.cli.running import Home
from tests.cli.serving import Daemon, serving
from tests.fakes import FakeBackend


def cache(state: str = "on", reason: str | None = None, queued: int = 0, **counts: int) -> dict[str, Any]:
    return {
        "enabled": True,
        "bytes": {"hot": 0, "ssd": 49_000_000},
        "max_bytes": {"hot": 1_000_000_000, "ssd": 50_000_000_000},
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "ssd": {"state": state, "reason": reason, "queued_bytes": queued, "counts": counts},
    }


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (cache(written=12), "49 MB of 50.0 GB"),
        (cache(queued=3_000_000), "49 MB of 50.0 GB; 3 MB to be written"),
        (cache("paused", "No space left on device"), "49 MB of 50.0 GB; paused: No space left on device"),
        (cache("read_only", "it belongs to pid 7"), "49 MB of 50.0 GB; read only: it belongs to pid 7"),
        (cache(dropped=4, bad=1, foreign=2), "49 MB of 50.0 GB; 4 not written, 1 bad, 2 not omlxd's"),
        (cache("closed"), "not looked at yet: no model has been loaded"),
        (cache("off"), "off: cache.ssd.enabled is false"),
        ({"enabled": True}, None),
    ],
)
def test_the_line_says_how_the_disk_is(given: dict[str, Any], line: str | None) -> None:
    assert disk_line(given) == line


class FullDisk(FakeBackend):
    def status(self) -> DaemonStatus:
        return replace(super().status(), cache=cache("paused", "No space left on device"))


@pytest.fixture
def daemon(home: Home) -> Iterator[Daemon]:
    with serving(home, FullDisk()) as daemon:
        yield daemon


def test_status_and_cache_stats_show_it(home: Home, daemon: Daemon) -> None:
    said = "49 MB of 50.0 GB; paused: No space left on device"
    assert f"on disk   {said}" in home.run("status").text.splitlines()
    assert home.run("cache", "stats").text.splitlines()[-1] == f"on disk: {said}"
    assert all("on disk" not in line for line in home.run("cache", "stats", "--json").document)
