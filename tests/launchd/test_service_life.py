"""The service's life on a Mac: installed, logged in, crashed, upgraded, moved, blocked, uninstalled.

The launchd is a fake, written from what is known of the real one; omlxctl and the daemon are the real ones.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omlxd.launchd.agent import LABEL
from omlxd.rpc.client import Client
from tests.cli.running import OMLXCTL, Outcome
from tests.launchd.living import LONG, Mac, mac

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fresh() -> Iterator[Mac]:
    with mac() as living:
        yield living


@pytest.fixture
def installed(fresh: Mac) -> Mac:
    """Installed, running, and past launchd's throttle."""
    fresh.done("service", "install")
    fresh.launchd.pass_time(LONG)
    return fresh


def health(living: Mac) -> dict[str, Any]:
    outcome = living.run("service", "status", "--json")
    document: dict[str, Any] = outcome.document
    assert outcome.code == int(document["installed"] is None or bool(document["faults"]))
    assert all(fault["advice"] for fault in document["faults"])
    return document


def faults(living: Mac) -> str:
    return "; ".join(fault["message"] for fault in health(living)["faults"])


# -- install ----------------------------------------------------------------------------------------------------------


def test_installed_it_runs_answers_and_is_in_order(fresh: Mac) -> None:
    outcome = fresh.done("service", "install")
    assert outcome.errors == [f"the service {LABEL} is installed; it starts at login and runs now"]
    assert fresh.daemon_pid() == fresh.pid is not None
    found = health(fresh)
    assert (found["state"], found["pid"], found["answers"], found["faults"]) == ("running", fresh.pid, True, [])
    assert found["loaded"] == [f"gui/{os.getuid()}"]
    assert fresh.agent.stat().st_mode & 0o777 == 0o600
    assert fresh.log("launchd.log") == ""


def test_installing_again_changes_nothing(installed: Mac) -> None:
    before, commands = installed.pid, len(installed.launchd.log)
    assert installed.done("service", "install", "--json").document["changed"] is False
    assert installed.pid == before
    assert {line.split()[0] for line in installed.launchd.log[commands:]} <= {"print", "print-disabled"}


def test_a_dry_run_shows_the_list_and_the_commands_and_does_neither(fresh: Mac) -> None:
    outcome = fresh.done("service", "install", "--dry-run")
    assert "<key>KeepAlive</key>" in outcome.text
    assert f"launchctl bootstrap gui/{os.getuid()} {fresh.agent}" in outcome.text
    assert not fresh.agent.exists()
    assert not fresh.home.path.exists()
    assert {line.split()[0] for line in fresh.launchd.log} == {"print"}
    steps = fresh.done("service", "install", "--dry-run", "--json").document["steps"]
    assert [step.split()[0] for step in steps] == ["write", "launchctl", "launchctl"]


def test_a_daemon_that_runs_already_gives_way_to_the_service(fresh: Mac) -> None:
    fresh.done("models")  # starts one in the background
    before = fresh.daemon_pid()
    outcome = fresh.done("service", "install")
    assert f"ended the daemon that ran already (pid {before})" in outcome.errors
    assert fresh.daemon_pid() == fresh.pid != before


def test_only_variables_that_say_where_models_are_go_into_the_list(fresh: Mac) -> None:
    fresh.done("service", "install", env={"HF_TOKEN": "secret", "HF_HOME": "/models", "OMLXD_LOG__LEVEL": "debug"})
    text = fresh.agent.read_text()
    assert "/models" in text
    assert not re.search("secret|HF_TOKEN|debug", text)


def test_a_longer_grace_gives_launchd_more_patience(fresh: Mac) -> None:
    fresh.done("config", "set", "daemon.grace_s", "60")
    fresh.done("service", "install")
    assert "<integer>75</integer>" in fresh.agent.read_text()
    fresh.done("config", "set", "daemon.grace_s", "90")
    assert faults(fresh) == "launchd kills the daemon after 75 s, and daemon.grace_s is 90"


def test_settings_that_cannot_be_used_are_refused_before_anything_is_done(fresh: Mac) -> None:
    fresh.home.path.mkdir(mode=0o700)
    (fresh.home.path / "config.toml").write_text("[engine]\nmax_bach = 1\n")
    outcome = fresh.run("service", "install")
    assert (outcome.code, "engine.max_bach" in outcome.errors[0]) == (1, True)
    assert not fresh.agent.exists()


def test_over_ssh_without_a_login_at_the_screen_the_users_domain_serves() -> None:
    with mac(domains=["user"]) as living:
        living.done("service", "install")
        assert health(living)["loaded"] == [f"user/{os.getuid()}"]
        living.launchd.login()  # somebody comes to the screen: launchd loads it there too
        job = living.launchd.job(LABEL)
        assert job is not None
        living.launchd.wait_for(lambda: job.last_exit == "0")  # and the lock lets only one live
        assert health(living)["pid"] == living.daemon_pid()
        assert "already running" in living.log("launchd.log")
        living.launchd.pass_time(LONG)
        assert job.runs == 1


def test_under_sudo_it_is_refused(fresh: Mac) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be under sudo")
    outcome = fresh.run("service", "install", env={"SUDO_UID": "501"})
    assert (outcome.code, "without sudo" in outcome.errors[0]) == (1, True)


def test_without_launchctl_it_is_refused_and_the_log_is_shown_all_the_same(fresh: Mac) -> None:
    env = {"PATH": "/usr/bin:/bin"}
    outcome = fresh.run("service", "install", env=env)
    assert (outcome.code, "has no launchctl" in outcome.errors[0]) == (1, True)
    fresh.done("models", env=env)
    assert "ready at" in fresh.done("service", "logs", env=env).text
    fresh.done("shutdown", env=env)


def test_a_flag_of_another_action_is_a_usage_error(fresh: Mac) -> None:
    assert fresh.run("service", "stop", "--on-demand").code == 2
    assert fresh.run("service", "start", "-f").code == 2


# -- life -------------------------------------------------------------------------------------------------------------


def test_stopped_it_stays_so_until_it_is_started(installed: Mac) -> None:
    installed.done("service", "stop")
    assert (installed.daemon_pid(), installed.agent.exists()) == (None, True)
    assert "does not run" in installed.done("service", "stop").errors[0]
    assert faults(installed) == "it is not loaded"
    installed.done("service", "start")
    assert installed.daemon_pid() == installed.pid is not None
    assert "runs already" in installed.done("service", "start").errors[0]


def test_a_stop_that_was_asked_for_over_the_socket_is_not_undone(installed: Mac) -> None:
    installed.done("shutdown")
    installed.launchd.wait_for(lambda: installed.pid is None)
    installed.launchd.pass_time(LONG)
    assert installed.pid is None
    assert "`omlxctl service start`" in health(installed)["faults"][0]["advice"]


def test_restarted_it_is_another_process(installed: Mac) -> None:
    before = installed.pid
    installed.done("service", "restart")
    assert installed.daemon_pid() == installed.pid != before
    assert any("kickstart -k" in line for line in installed.launchd.log)


def test_a_command_that_needs_a_daemon_starts_the_service(installed: Mac) -> None:
    for way in ("stop", "shutdown"):
        installed.done(*(["service", "stop"] if way == "stop" else ["shutdown"]))
        installed.launchd.wait_for(lambda: installed.pid is None)
        installed.launchd.pass_time(LONG)
        assert installed.run("models", "--no-start").code == 3
        outcome = installed.done("models", "--json")
        assert (outcome.document, outcome.errors) == ([], [f"starting the service {LABEL}"])
        assert installed.daemon_pid() == installed.pid is not None


def test_another_home_gets_a_daemon_of_its_own(installed: Mac) -> None:
    installed.done("service", "stop")
    other = {"OMLXD_HOME": str(installed.directory / "other")}
    assert "in the background" in installed.done("models", env=other).errors[0]
    assert installed.pid is None
    installed.done("shutdown", env=other)


def test_after_a_crash_it_comes_back_at_once_and_in_a_storm_launchd_slows_it_down(installed: Mac) -> None:
    installed.crash()
    first = installed.wait_answers()
    job = installed.launchd.job(LABEL)
    assert job is not None
    waits = []
    for _ in range(4):
        installed.crash()
        waited = 0
        while job.due_at is not None:
            installed.launchd.pass_time(10)
            waited += 10
        waits.append(waited)
        installed.wait_answers()
    assert waits == [10, 20, 40, 80]
    assert installed.daemon_pid() == installed.pid != first


def test_a_start_that_launchd_holds_back_says_so(installed: Mac) -> None:
    installed.done("service", "restart")
    installed.crash()  # seconds after its start
    outcome = installed.run("service", "status")
    assert (outcome.code, "spawn scheduled" in outcome.text, "Aborted: 6" in outcome.text) == (1, True, True)


def test_settings_gone_bad_stop_it_and_are_named_by_start(installed: Mac) -> None:
    (installed.home.path / "config.toml").write_text("[engine]\nmax_bach = 1\n")
    installed.crash()
    job = installed.launchd.job(LABEL)
    assert job is not None
    installed.launchd.wait_for(lambda: job.state == "not running")
    runs = job.runs
    installed.launchd.pass_time(LONG)
    assert job.runs == runs  # not restarted for ever
    assert "engine.max_bach" in installed.log("launchd.log")
    assert "engine.max_bach" in faults(installed)
    outcome = installed.run("models")
    assert outcome.code == 3
    assert any("engine.max_bach" in line for line in outcome.errors)


def test_after_a_reboot_it_runs_when_somebody_logs_in(installed: Mac) -> None:
    installed.reboot()
    assert installed.daemon_pid() is None
    installed.launchd.login()
    assert installed.wait_answers() == installed.pid


def test_in_both_sessions_of_one_login_one_daemon_runs(installed: Mac) -> None:
    installed.reboot()
    installed.launchd.login()
    installed.launchd.login_in_background()
    pid = installed.wait_answers()
    jobs = [installed.launchd.job(LABEL, kind) for kind in ("gui", "user")]
    installed.launchd.wait_for(lambda: sum(job is not None and job.process is not None for job in jobs) == 1)
    assert installed.daemon_pid() == pid
    installed.launchd.pass_time(LONG)
    installed.done("service", "restart")
    assert health(installed)["loaded"] == [f"gui/{os.getuid()}"]


def test_a_logout_ends_it(installed: Mac) -> None:
    installed.launchd.logout()
    installed.launchd.wait_for(lambda: installed.pid is None)
    assert installed.daemon_pid() is None


def test_a_daemon_that_does_not_end_is_killed_after_the_time_out_and_uninstall_waits_for_that(installed: Mac) -> None:
    pid = installed.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with installed.home.start("service", "uninstall") as uninstalling:
        installed.launchd.wait_for(lambda: any("bootout" in line for line in installed.launchd.log))
        installed.launchd.pass_time(29)
        assert installed.pid == pid
        installed.launchd.pass_time(2)
        uninstalling.communicate(timeout=30)
    assert uninstalling.returncode == 0
    assert (installed.pid, installed.agent.exists()) == (None, False)


# -- uninstall --------------------------------------------------------------------------------------------------------


def test_uninstalled_nothing_of_it_is_left_but_the_home(installed: Mac) -> None:
    installed.done("service", "uninstall")
    assert (installed.daemon_pid(), installed.agent.exists(), installed.home.path.exists()) == (None, False, True)
    assert health(installed)["installed"] is None
    assert "is not installed" in installed.done("service", "uninstall").errors[0]
    assert installed.run("service", "start").code == 1
    installed.reboot()
    installed.launchd.login()
    assert installed.launchd.job(LABEL) is None


def test_a_file_that_was_removed_by_hand_does_not_keep_it_from_being_uninstalled(installed: Mac) -> None:
    installed.agent.unlink()
    installed.done("service", "uninstall")
    assert installed.launchd.job(LABEL) is None


# -- what macOS may do ------------------------------------------------------------------------------------------------


def test_switched_off_in_login_items_it_is_not_loaded_at_login_and_status_points_there(installed: Mac) -> None:
    installed.reboot()
    installed.launchd.blocked.add(LABEL)
    installed.launchd.login()
    (fault,) = health(installed)["faults"]
    assert fault["message"] == "it is not loaded"
    assert "Login Items" in fault["advice"]
    outcome = installed.run("models")
    assert outcome.code == 3
    assert "Login Items" in outcome.errors[-1]


def test_disabled_in_launchds_record_it_is_named_and_start_enables_it(installed: Mac) -> None:
    installed.done("service", "stop")
    installed.launchd.command(["disable", f"gui/{os.getuid()}/{LABEL}"])
    assert faults(installed) == "it is switched off"
    installed.done("service", "start")
    assert faults(installed) == ""


def test_a_directory_for_the_output_that_is_gone_is_named_and_start_makes_it(installed: Mac) -> None:
    installed.done("service", "stop")
    shutil.rmtree(installed.home.path / "logs")
    assert "is gone, and launchd starts nothing then" in faults(installed)
    installed.done("service", "start")
    assert faults(installed) == ""


def test_what_launchd_cannot_start_at_all_is_code_78_and_explained_at_once(installed: Mac) -> None:
    installed.done("service", "stop")
    installed.agent.write_text(installed.agent.read_text().replace(sys.executable, "/gone/bin/python"))
    outcome = installed.run("service", "start")
    assert outcome.code == 1
    assert "it could not be started: its program, its output file or its settings" in outcome.errors[0]


# -- environments that move and change --------------------------------------------------------------------------------


@pytest.fixture
def environment(fresh: Mac) -> Path:
    """A virtual environment with a copy of omlxd in it, which can be moved and upgraded."""
    venv = fresh.directory / "venv"
    packages = venv / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (venv / "bin").mkdir(parents=True)
    os.symlink(os.path.realpath(sys.executable), venv / "bin" / "python")
    home = os.path.dirname(os.path.realpath(sys.executable))
    (venv / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "omlxd", packages / "omlxd", ignore=ignored)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


def by(venv: Path, living: Mac, *arguments: str) -> Outcome:
    """omlxctl of that environment."""
    command = [str(venv / "bin" / "python"), *OMLXCTL[1:], *arguments]
    done = subprocess.run(command, env=living.home.env, capture_output=True, timeout=60)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_an_upgrade_under_the_running_service_is_seen_and_a_restart_ends_it(fresh: Mac, environment: Path) -> None:
    assert by(environment, fresh, "service", "install").code == 0
    (module,) = environment.glob("lib/*/site-packages/omlxd/__init__.py")
    module.write_text(module.read_text().replace('__version__ = "', '__version__ = "9.'))
    fresh.launchd.pass_time(LONG)
    outcome = by(environment, fresh, "service", "status")
    assert outcome.code == 1
    assert re.search(r"omlxd 0\.\S+ runs, and 9\.0\.\S+ is installed\n\s+`omlxctl service restart`", outcome.text)
    assert by(environment, fresh, "service", "restart").code == 0
    assert by(environment, fresh, "service", "status").code == 0
    with Client.connect(fresh.home.socket) as client:
        assert client.call("daemon.info")["version"].startswith("9.")


def test_an_environment_that_was_moved_is_seen_and_installing_from_there_mends_it(
    fresh: Mac, environment: Path
) -> None:
    assert by(environment, fresh, "service", "install").code == 0
    moved = environment.rename(environment.with_name("moved"))
    fresh.launchd.pass_time(LONG)
    outcome = by(moved, fresh, "service", "status")
    assert f"its Python {environment}/bin/python is gone" in outcome.text
    assert "run `omlxctl service install` again" in outcome.text
    fresh.crash()
    job = fresh.launchd.job(LABEL)
    assert job is not None
    fresh.launchd.wait_for(lambda: job.last_exit == "78")
    fresh.launchd.pass_time(LONG)
    assert by(moved, fresh, "service", "install").code == 0
    assert by(moved, fresh, "service", "status").code == 0
    assert fresh.daemon_pid() == fresh.pid is not None


def test_a_second_environment_is_told_which_one_the_service_runs(installed: Mac, environment: Path) -> None:
    outcome = by(environment, installed, "service", "status")
    assert f"it runs {sys.executable}, and this omlxctl belongs to {environment}/bin/python" in outcome.text
