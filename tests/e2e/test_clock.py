"""Clocks that jump: the daemon runs under libfaketime, which moves its wall clock and leaves the monotonic one alone.

DM-22 of the known cases: what is measured by the time of day expires, or ages backwards, when that is set.
"""

from __future__ import annotations

import os
from glob import glob
from pathlib import Path

import pytest

from omlxd.rpc.client import RpcError
from tests.e2e.living import Daemon, daemon_in_new_home
from tests.models import write

LIBRARY = next(iter(glob("/usr/lib/*/faketime/libfaketimeMT.so.1")), None)
LONG = {"model": "tiny", "prompt": "x", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed; .ci/run says how")


class Clock:
    """The daemon's time of day: the true one, moved."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.move("+0d")

    def move(self, by: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(by)
        os.replace(new, self._file)

    @property
    def env(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "OMLXD_MODELS__TTL_S": "600",
        }


def day(daemon: Daemon) -> float:
    """The day, counted from 1970, on which the daemon believes that it was last asked."""
    daemon.call("generate.complete", model="tiny", prompt="x", max_tokens=1)
    (entry,) = daemon.call("models.list")
    return float(entry["last_used"]) / 86400


def test_a_jump_of_a_day_either_way_ends_nothing_and_ages_nothing(tmp_path: Path) -> None:
    with daemon_in_new_home() as daemon:
        write("llama", daemon.models / "tiny", eos=[])
        clock = Clock(tmp_path / "time")
        daemon.start(**clock.env)
        today = day(daemon)
        with daemon.client() as client:
            call = client.start("generate.complete", LONG)
            values = iter(call)
            for jump, days in (("+1d", 1), ("-1d", -1), ("-7000d", -7000)):
                next(values)
                clock.move(jump)
                assert day(daemon) - today == pytest.approx(days, abs=0.1), "the clock did not move"
                (live,) = daemon.call("daemon.status")["requests"]
                assert 0 <= live["age_s"] < 600
                assert 0 <= daemon.call("daemon.info")["uptime_s"] < 600
                (entry,) = daemon.call("models.list")
                assert entry["state"] == "BUSY"
            next(values)
            call.cancel()
            with pytest.raises(RpcError) as caught:
                call.result(timeout_s=60)
        assert caught.value.partial["usage"]["completion_tokens"] > 3
        assert all(value >= 0 for value in caught.value.partial["timings"].values())
