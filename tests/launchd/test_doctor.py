"""What `omlxctl doctor` says of the service."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator

import pytest

from omlxd.launchd.agent import LABEL
from tests.launchd.living import LONG, Mac, mac


@pytest.fixture
def installed() -> Iterator[Mac]:
    with mac() as living:
        living.done("service", "install")
        living.launchd.pass_time(LONG)
        yield living


def found(living: Mac) -> tuple[int, dict[str, str]]:
    """The exit code, and what is said of the service."""
    outcome = living.run("doctor", "--json")
    (finding,) = [finding for finding in outcome.document["findings"] if finding["check"] == "service"]
    assert bool(finding["advice"]) == (finding["level"] != "ok")
    return outcome.code, finding


def test_one_that_is_in_order_and_none_are_both_fine(installed: Mac) -> None:
    code, finding = found(installed)
    assert (code, finding["level"], finding["message"]) == (0, "ok", f"{installed.agent}, gui/{os.getuid()}")
    installed.done("service", "uninstall")
    code, finding = found(installed)
    assert (code, finding["level"], finding["message"].split(";")[0]) == (0, "ok", "not installed")


def test_one_that_was_stopped_is_a_warning_and_one_that_cannot_start_a_failure(installed: Mac) -> None:
    installed.done("service", "stop")
    assert (found(installed)[0], found(installed)[1]["level"]) == (0, "warn")
    installed.agent.write_text(installed.agent.read_text().replace(sys.executable, "/gone/bin/python"))
    outcome = installed.run("doctor")
    assert outcome.code == 1
    assert "fail  service   its Python /gone/bin/python is gone" in outcome.text


def test_a_daemon_that_launchd_did_not_start_is_found(installed: Mac) -> None:
    installed.done("service", "stop")
    installed.done("models", env={"PATH": "/usr/bin:/bin"})  # finds no launchctl, so it starts one itself
    installed.launchd.command(["bootstrap", f"gui/{os.getuid()}", str(installed.agent)])
    job = installed.launchd.job(LABEL)
    assert job is not None
    installed.launchd.wait_for(lambda: job.last_exit == "0")
    outcome = installed.run("doctor", "--json")
    said = [finding["message"] for finding in outcome.document["findings"] if finding["check"] == "service"]
    assert any("another daemon serves the home" in message for message in said)
    installed.launchd.pass_time(LONG)
    installed.done("service", "start")
    assert installed.daemon_pid() == installed.pid is not None


def test_models_where_macos_asks_before_a_service_may_look_are_pointed_out(installed: Mac) -> None:
    places = [str(installed.directory / "Documents" / "models"), "/Volumes/Disk", str(installed.directory / "fine")]
    outcome = installed.run("doctor", "--json", env={"OMLXD_MODELS__DIRS": ":".join(places)})
    findings = [finding for finding in outcome.document["findings"] if finding["check"] == "service"]
    assert [finding["level"] for finding in findings] == ["ok", "warn", "warn"]
    for place, finding in zip(places[:2], findings[1:], strict=True):
        assert place in finding["message"]
        assert "Files and Folders" in finding["advice"]


def test_a_launchctl_that_fails_is_a_finding_and_no_accident(installed: Mac) -> None:
    shim = installed.directory / "bin" / "launchctl"
    shutil.copy("/bin/sh", shim)  # something that understands nothing it is asked
    code, finding = found(installed)
    assert (code, finding["level"]) == (1, "fail")
    assert "launchctl print" in finding["message"]
