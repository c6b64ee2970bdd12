"""`omlxctl doctor`: each thing that can be wrong, found and given a remedy."""

import os
import socket
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from omlxd.cli.packages import required_packages
from tests.cli.running import Home
from tests.cli.serving import Daemon
from tests.fakes import entry


def findings(home: Home, env: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The findings by check; of several from one check, the gravest."""
    outcome = home.run("doctor", "--json", env=env)
    document = outcome.document
    assert outcome.code == (0 if document["ok"] else 1)
    assert ("error" in document) is not document["ok"]
    gravest: dict[str, dict[str, Any]] = {}
    for finding in document["findings"]:
        known = gravest.get(finding["check"])
        if known is None or ["ok", "warn", "fail"].index(finding["level"]) > ["ok", "warn", "fail"].index(
            known["level"]
        ):
            gravest[finding["check"]] = finding
    return gravest


def test_with_a_healthy_daemon_everything_is_ok(home: Home, daemon: Daemon) -> None:
    found = findings(home)
    assert {check: finding["level"] for check, finding in found.items() if check != "disk"} == dict.fromkeys(
        ["home", "socket", "settings", "packages", "daemon", "device", "models"], "ok"
    )
    assert home.run("doctor").text.startswith("ok    home")


def test_before_the_first_start_nothing_is_wrong_but_no_daemon_runs(home: Home) -> None:
    found = findings(home)
    assert (found["home"]["level"], found["socket"]["level"], found["daemon"]["level"]) == ("ok", "ok", "warn")
    assert found["daemon"]["advice"]
    assert not home.path.exists()


def test_a_home_open_to_others_fails_with_the_command_that_closes_it(home: Home) -> None:
    home.path.mkdir()
    home.path.chmod(0o755)
    found = findings(home)["home"]
    assert (found["level"], found["advice"]) == ("fail", f"chmod 700 {home.path}")


def test_a_home_that_is_a_file_fails(home: Home) -> None:
    home.path.write_text("")
    assert findings(home)["home"]["level"] == "fail"


def test_a_socket_path_over_102_bytes_fails(home: Home) -> None:
    found = findings(home, {"OMLXD_SOCKET": "/tmp/" + "x" * 98})
    assert found["socket"]["level"] == "fail"
    assert "103 bytes" in found["socket"]["message"]


def test_a_socket_open_to_others_fails(home: Home, daemon: Daemon) -> None:
    os.chmod(home.socket, 0o666)
    assert findings(home)["socket"]["level"] == "fail"


def test_something_else_in_the_sockets_place_fails(home: Home) -> None:
    home.path.mkdir(mode=0o700)
    (home.path / "omlxd.sock").write_text("")
    assert findings(home)["socket"]["level"] == "fail"


def test_a_program_that_listens_and_is_no_daemon_fails(home: Home) -> None:
    home.path.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(home.socket)
        os.chmod(home.socket, 0o600)
        listener.listen()
        with home.start("doctor", "--json") as process, listener.accept()[0] as stranger:
            stranger.sendall(b"220 mail ready\r\n")
            out, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert b"does not speak JSON-RPC" in out


def test_a_daemon_of_another_version_is_a_warning_and_of_another_protocol_a_failure(home: Home, daemon: Daemon) -> None:
    info = daemon.backend.info()
    daemon.backend.info = lambda: replace(info, version="0.0.9")
    assert findings(home)["daemon"]["level"] == "warn"
    daemon.backend.info = lambda: replace(info, protocol=0)
    assert findings(home)["daemon"]["level"] == "fail"


def test_each_model_that_cannot_load_is_named_with_its_reason(home: Home, daemon: Daemon) -> None:
    daemon.backend.models["torn"] = replace(entry("torn"), state="FAILED", error="model.safetensors is cut short")
    found = findings(home)["models"]
    assert found["level"] == "warn"
    assert "torn: model.safetensors is cut short" in found["message"]
    assert "/models/torn" in found["advice"]


def test_settings_that_cannot_be_used_fail_with_the_key(home: Home) -> None:
    found = findings(home, {"OMLXD_ENGINE__MAX_BATCH": "none"})["settings"]
    assert found["level"] == "fail"
    assert "engine.max_batch" in found["message"]


def test_too_little_disk_for_the_cache_is_a_warning(home: Home) -> None:
    found = findings(home, {"OMLXD_CACHE__SSD__MIN_FREE_BYTES": "900000GB"})["disk"]
    assert found["level"] == "warn"
    assert "min_free_bytes" in found["message"]


@pytest.mark.parametrize("name", ["mlx", "mlx-lm", "jsonrpcserver", "msgspec"])
def test_the_packages_are_those_that_omlxd_requires(name: str) -> None:
    packages = {package.name: package for package in required_packages()}
    assert packages[name].fits
    assert packages[name].installed is not None
    assert "pytest" not in packages


def test_a_lock_left_by_a_crash_is_no_fault(home: Home) -> None:
    home.path.mkdir(mode=0o700)
    with subprocess.Popen(["true"]) as gone:
        pass
    (home.path / "omlxd.lock").write_text(f"pid {gone.pid}, version 0.1.0\n")
    found = findings(home)["lock"]
    assert (found["level"], "the next daemon takes it over" in found["message"]) == ("ok", True)


def test_a_lock_whose_owner_lives_and_does_not_answer_is_named_with_its_pid(home: Home) -> None:
    home.path.mkdir(mode=0o700)
    (home.path / "omlxd.lock").write_text(f"pid {os.getpid()}, version 0.1.0\n")
    found = findings(home)["lock"]
    assert found["level"] == "warn"
    assert f"names pid {os.getpid()}" in found["message"]
    assert f"kill -9 {os.getpid()}" in found["advice"]


@pytest.mark.parametrize(
    ("limit_mb", "setting", "level", "advice"),
    [
        (0, "", "ok", ""),
        (24000, "8GB", "ok", ""),
        (24000, "25GB", "warn", "lower the setting, or `sudo sysctl iogpu.wired_limit_mb=25600`"),
        (32000, "", "warn", "`sudo sysctl iogpu.wired_limit_mb=0` is macOS's own limit"),
    ],
)
def test_what_the_gpu_may_wire_fits_the_machine_and_the_setting(
    home: Home, limit_mb: int, setting: str, level: str, advice: str
) -> None:
    sysctl = home.path.parent / "bin" / "sysctl"  # a Mac with 32 GiB
    sysctl.parent.mkdir()
    sysctl.write_text(f"#!/bin/sh\ncase $2 in hw.memsize) echo {32 << 30};; *) echo {limit_mb};; esac\n")
    sysctl.chmod(0o755)
    env = {"PATH": f"{sysctl.parent}:{os.environ['PATH']}", "OMLXD_MEMORY__WIRED_LIMIT_BYTES": setting}
    found = findings(home, env)["wired"]
    assert (found["level"], found["advice"]) == (level, advice)


def test_every_finding_that_is_not_ok_says_what_to_do(home: Home) -> None:
    home.path.mkdir(mode=0o755)
    (home.path / "config.toml").write_text("[log]\nlevel = 3\n")
    (home.path / "omlxd.sock").write_text("")
    for finding in home.run("doctor", "--json").document["findings"]:
        assert bool(finding["advice"]) == (finding["level"] != "ok"), finding
