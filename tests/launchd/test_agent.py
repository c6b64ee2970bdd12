"""The property list: its values, and what is found wrong with one that was written earlier."""

from __future__ import annotations

import os
import plistlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omlxd.launchd import agent
from omlxd.launchd.agent import Agent
from omlxd.launchd.service import write


def made(tmp_path: Path, **changes: Any) -> Agent:
    plain = Agent(
        python=sys.executable,
        home=str(tmp_path / "home & sons"),
        socket=str(tmp_path / "home & sons" / "omlxd.sock"),
        log_dir=str(tmp_path / "home & sons" / "logs"),
        grace_s=10,
    )
    return replace(plain, **changes)


def read_back(made: Agent) -> dict[str, Any]:
    return dict(plistlib.loads(made.encode()))


def test_a_crash_is_answered_with_a_start_and_a_stop_is_not(tmp_path: Path) -> None:
    plist = read_back(made(tmp_path))
    assert plist["RunAtLoad"] is True
    assert plist["KeepAlive"] == {"SuccessfulExit": False}  # in that polarity: else every stop would be undone
    assert plist["ThrottleInterval"] >= 10


def test_on_demand_launchd_listens_and_starts_nothing_by_itself(tmp_path: Path) -> None:
    plist = read_back(made(tmp_path, on_demand=True))
    assert {"RunAtLoad", "KeepAlive"} & set(plist) == set()
    assert plist["Sockets"] == {"rpc": {"SockPathName": f"{tmp_path}/home & sons/omlxd.sock", "SockPathMode": 384}}


def test_the_environments_own_python_is_run_without_the_users_variables(tmp_path: Path) -> None:
    program, *options = read_back(made(tmp_path, python="/venv/bin/python"))["ProgramArguments"]
    assert program == "/venv/bin/python"
    assert options == ["-I", "-u", "-X", "faulthandler", "-m", "omlxd.daemon", "--supervised=launchd"]


def test_nothing_of_a_shell_is_taken_for_granted(tmp_path: Path) -> None:
    plist = read_back(made(tmp_path, variables={"HF_HOME": "/models"}))
    assert plist["EnvironmentVariables"] == {
        "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
        "OMLXD_HOME": str(tmp_path / "home & sons"),
        "OMLXD_SOCKET": str(tmp_path / "home & sons" / "omlxd.sock"),
        "HF_HOME": "/models",
    }
    for key in ("WorkingDirectory", "StandardOutPath", "StandardErrorPath"):
        assert plist[key].startswith("/")


def test_the_gpu_is_not_throttled_and_what_it_writes_is_private(tmp_path: Path) -> None:
    plist = read_back(made(tmp_path))
    assert (plist["ProcessType"], plist["Umask"]) == ("Interactive", 63)
    assert plist["SoftResourceLimits"] == {"NumberOfFiles": 4096}
    assert plist["LimitLoadToSessionType"] == ["Aqua", "Background"]
    forbidden = {"EnableTransactions", "EnablePressuredExit", "Disabled", "Nice", "LowPriorityIO"}
    assert forbidden & set(plist) == set()


@pytest.mark.parametrize(("grace_s", "timeout_s"), [(0, 30), (10, 30), (15.5, 31), (120, 135)])
def test_launchd_waits_longer_than_the_daemon_drains(tmp_path: Path, grace_s: float, timeout_s: int) -> None:
    assert read_back(made(tmp_path, grace_s=grace_s))["ExitTimeOut"] == timeout_s


# -- read back --------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "home & sons" / "logs").mkdir(parents=True)
    path = tmp_path / "agents" / "x.plist"
    write(str(path), made(tmp_path).encode())
    return path


def found(path: Path, *, python: str = sys.executable, grace_s: float = 10) -> list[str]:
    installed = agent.read(str(path))
    assert installed is not None
    faults = agent.faults(installed, python=python, grace_s=grace_s)
    assert all(fault.advice for fault in faults)
    return [fault.message for fault in faults]


def test_what_is_written_is_private_whole_and_in_order(path: Path, tmp_path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == ["x.plist"]
    installed = agent.read(str(path))
    assert installed is not None
    assert (installed.python, installed.on_demand, installed.exit_timeout_s) == (sys.executable, False, 30)
    assert installed.serves(made(tmp_path).socket)
    assert not installed.serves("/elsewhere/omlxd.sock")
    assert found(path) == []


def test_none_is_none(tmp_path: Path) -> None:
    assert agent.read(str(tmp_path / "none.plist")) is None


def test_a_python_that_is_gone_and_one_of_another_environment_are_told_apart(path: Path, tmp_path: Path) -> None:
    assert "and this omlxctl belongs to /other/python" in found(path, python="/other/python")[0]
    write(str(path), made(tmp_path, python="/gone/bin/python").encode())
    assert found(path) == ["its Python /gone/bin/python is gone: the virtual environment was moved or removed"]


def test_a_grace_longer_than_launchd_waits_is_found(path: Path) -> None:
    assert found(path, grace_s=60) == ["launchd kills the daemon after 30 s, and daemon.grace_s is 60"]


def test_a_missing_directory_for_the_output_is_found(path: Path, tmp_path: Path) -> None:
    (tmp_path / "home & sons" / "logs").rmdir()
    assert "logs, is gone" in found(path)[0]


def test_a_link_and_a_file_open_to_others_are_found(path: Path) -> None:
    path.chmod(0o664)
    assert "mode 0664" in found(path)[0]
    path.rename(path.with_name("real"))
    path.symlink_to("real")
    assert "is a link" in found(path)[0]


@pytest.mark.parametrize("content", [b"", b"<plist>", b"bplist00", plistlib.dumps({"Label": "other"})])
def test_a_file_that_is_not_our_property_list_is_one_fault(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert found(path) == [f"{path} is not a property list of dev.omlx.omlxd"]
