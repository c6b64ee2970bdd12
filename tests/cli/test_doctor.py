"""`omlxctl doctor`: each thing that can be wrong, found and given a remedy."""

import os
import socket
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
