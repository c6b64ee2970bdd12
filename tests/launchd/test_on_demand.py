"""The service on demand: launchd holds the socket, and the daemon comes with its first client.

The real omlxctl and the real daemon; launchd is the fake, and hands its socket over through a libSystem compiled here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlxd.launchd.agent import LABEL
from omlxd.rpc.client import Client
from tests.launchd.fake_job import Job
from tests.launchd.living import LONG, Mac, mac


@pytest.fixture
def installed(libsystem: Path) -> Iterator[Mac]:
    with mac(libsystem=libsystem) as living:
        living.done("service", "install", "--on-demand")
        living.launchd.pass_time(LONG)
        yield living


def job_of(living: Mac) -> Job:
    job = living.launchd.job(LABEL)
    assert job is not None
    return job


def ended(living: Mac) -> None:
    """Returns when the daemon has gone, and launchd would start another one at once."""
    living.launchd.wait_for(lambda: living.pid is None)
    living.launchd.pass_time(LONG)


def file_of(living: Mac) -> tuple[int, int]:
    state = os.lstat(living.home.socket)
    return state.st_ino, state.st_mode & 0o777


def test_it_listens_before_the_daemon_runs_and_the_daemon_leaves_the_file_alone(installed: Mac) -> None:
    before = file_of(installed)
    assert before[1] == 0o600
    first = installed.pid
    installed.done("shutdown")
    ended(installed)
    assert file_of(installed) == before
    assert installed.done("models", "--json").errors == []  # nothing to announce: launchd starts it
    assert installed.daemon_pid() == installed.pid != first
    assert file_of(installed) == before


def test_it_starts_nothing_by_itself(installed: Mac) -> None:
    installed.crash()
    installed.launchd.pass_time(LONG)
    assert installed.pid is None
    installed.reboot()
    installed.launchd.login()
    assert installed.pid is None
    assert installed.done("ping").text == "pong\n"


def test_idle_it_ends_and_comes_back_with_the_next_call(installed: Mac) -> None:
    installed.done("config", "set", "daemon.idle_exit_s", "0.2")
    installed.done("rpc", "daemon.reload")
    ended(installed)
    assert job_of(installed).last_exit == "0"
    assert installed.done("ping").text == "pong\n"


def test_status_and_doctor_ask_nobody_who_would_have_to_be_started(installed: Mac) -> None:
    installed.done("shutdown")
    ended(installed)
    outcome = installed.done("service", "status")
    assert "waits for its first client" in outcome.text
    installed.run("doctor")
    assert installed.pid is None


def test_a_client_that_comes_while_launchd_holds_back_waits_and_is_served(installed: Mac) -> None:
    installed.done("service", "restart")
    installed.done("shutdown")
    installed.launchd.wait_for(lambda: installed.pid is None)
    with Client.connect(installed.home.socket) as client:
        call = client.start("ping")
        installed.launchd.wait_for(lambda: job_of(installed).state == "spawn scheduled")
        installed.launchd.pass_time(10)
        assert call.result(timeout_s=30) == "pong"


def test_settings_gone_bad_are_told_to_each_client_and_start_no_endless_row(installed: Mac) -> None:
    installed.done("shutdown")
    ended(installed)
    (installed.home.path / "config.toml").write_text("[engine]\nmax_bach = 1\n")
    outcome = installed.run("models")
    assert (outcome.code, "omlxd cannot start" in outcome.errors[0], "engine.max_bach" in outcome.errors[0]) == (
        1,
        True,
        True,
    )
    ended(installed)
    runs = job_of(installed).runs
    installed.launchd.pass_time(LONG)
    assert (job_of(installed).runs, installed.pid) == (runs, None)


def test_a_daemon_in_the_foreground_is_named_to_who_asks_the_service(installed: Mac) -> None:
    installed.done("shutdown")
    ended(installed)
    other = {"OMLXD_SOCKET": str(installed.directory / "other.sock")}
    installed.done("models", env=other)  # the same home, another socket
    outcome = installed.run("ping")
    assert (outcome.code, "already running" in outcome.errors[0]) == (1, True)
    installed.done("shutdown", env=other)


def test_uninstalled_its_socket_is_gone_too(installed: Mac) -> None:
    installed.done("service", "uninstall")
    assert not os.path.lexists(installed.home.socket)
    assert not installed.agent.exists()


def test_one_kind_of_service_is_exchanged_for_the_other(installed: Mac) -> None:
    installed.done("service", "install")
    assert b"KeepAlive" in installed.agent.read_bytes()
    assert installed.daemon_pid() == installed.pid is not None
    installed.launchd.pass_time(LONG)
    installed.done("service", "install", "--on-demand")
    assert b"Sockets" in installed.agent.read_bytes()
    assert installed.daemon_pid() == installed.pid is not None
