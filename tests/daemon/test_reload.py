"""Settings read again: what is taken up, what waits for a restart, and what a broken file does."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from omlxd.daemon.reload import LiveSettings, described
from omlxd.daemon.settings import DaemonSettings, EngineSettings, LogSettings, Settings
from omlxd.engine.api import Reloaded
from omlxd.rpc.client import Client, RpcError
from tests.daemon.process import started, stopped

STARTED = Settings()


def test_a_key_goes_to_who_takes_it_up_and_the_others_wait_for_a_restart() -> None:
    live, taken = LiveSettings(STARTED, lambda: STARTED), list[Settings]()
    live.taken_up_by(taken.append, "log.level", "daemon.grace_s")
    new = replace(
        STARTED,
        log=LogSettings(level="debug"),
        daemon=DaemonSettings(grace_s=3),
        engine=EngineSettings(max_batch=7),
    )
    assert live.apply(new) == Reloaded(["daemon.grace_s", "log.level"], ["engine.max_batch"])
    assert taken == [new]  # once, however many of its keys have changed


def test_what_is_in_force_is_not_named_again_and_what_waits_is() -> None:
    live = LiveSettings(STARTED, lambda: STARTED)
    live.taken_up_by(lambda _: None, "log.level")
    new = replace(STARTED, log=LogSettings(level="debug"), engine=EngineSettings(max_batch=7))
    live.apply(new)
    assert live.apply(new) == Reloaded([], ["engine.max_batch"])
    assert live.apply(STARTED) == Reloaded(["log.level"], [])


@pytest.mark.parametrize(
    ("reloaded", "said"),
    [
        (Reloaded([], []), "nothing has changed"),
        (Reloaded(["log.level"], ["a.b", "c.d"]), "now in force: log.level; only after a restart: a.b, c.d"),
    ],
)
def test_the_log_has_one_line_about_it(reloaded: Reloaded, said: str) -> None:
    assert described(reloaded) == said


def test_settings_come_from_where_they_came_from_at_the_start() -> None:
    live = LiveSettings(STARTED, lambda: replace(STARTED, log=LogSettings(level="error")))
    assert live.read().log.level == "error"


def reload(home: Path) -> dict[str, list[str]]:
    with Client.connect(str(home / "omlxd.sock")) as client:
        answer = client.call("daemon.reload")
        assert isinstance(answer, dict)
        return answer


def test_the_daemon_takes_up_the_file_on_request_and_on_a_signal(home: Path) -> None:
    with started(home) as daemon:
        config = home / "config.toml"
        config.write_text(
            '[log]\nlevel = "warning"\n[models]\nttl_s = 60\nautoload = false\n'
            "[daemon]\ngrace_s = 1\nidle_exit_s = 3600\n[engine]\nmax_batch = 2\n[images]\nmax_pixels = 9\n"
        )
        assert reload(home) == {
            "applied": [
                *("daemon.grace_s", "daemon.idle_exit_s"),
                *("log.level", "models.autoload", "models.ttl_s", "images.max_pixels"),
            ],
            "needs_restart": ["engine.max_batch"],
        }
        config.write_text("[daemon]\nidle_exit_s = 0.05\n")
        daemon.send_signal(signal.SIGHUP)
        assert daemon.wait(30) == 0  # idle at once


def test_a_broken_file_changes_nothing_and_is_named(home: Path) -> None:
    with started(home) as daemon:
        (home / "config.toml").write_text("[log]\nlevel = 'loud'\n[engine]\nmax_batch = 2\n")
        with pytest.raises(RpcError) as caught:
            reload(home)
        assert (caught.value.code, caught.value.data["kind"]) == (-32022, "storage_failed")
        assert caught.value.message.startswith(f"{home}/config.toml: log.level takes one of")
        assert stopped(daemon) == 0
