"""`make run` and what it starts, without the installing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd.daemon.lock import InstanceLock

ROOT = Path(__file__).parents[2]
RECORD = """#!/bin/sh
for word in "$OMLXD_HOME" "$@"; do printf '%s\\0' "$word"; done >> "$RECORD"
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An installed one, as far as make can see; its Python writes down what it is asked."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(RECORD)
    python.chmod(0o755)
    for stamp in (".python", ".run"):
        (tmp_path / "venv" / stamp).touch()
    return tmp_path / "venv"


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "OMLXD_", "PROMPT"))
    }
    return subprocess.run(["make", *arguments], cwd=ROOT, env={**clean, **variables}, capture_output=True, text=True)


def asked(venv: Path, tmp_path: Path, *arguments: str) -> list[str]:
    """The words that `make run` gives to Python, the home first."""
    done = make("run", f"VENV={venv}", *arguments, RECORD=str(tmp_path / "record"))
    assert (done.returncode, done.stderr) == (0, "")
    return (tmp_path / "record").read_text().split("\0")[:-1]


def test_an_installed_clone_goes_straight_to_the_demo_with_its_state_in_the_clone(venv: Path, tmp_path: Path):
    home, *words, prompt = asked(venv, tmp_path)
    assert home == str(ROOT / ".omlxd")
    assert words == ["-m", "omlxd.cli.demo"]
    assert prompt.endswith("?")


@pytest.mark.parametrize(
    "prompt", ['it\'s "so"', "$5 or $HOME or $(shell echo x) or $(", "`id`; # \\n", "-n", "日本 🙂"]
)
def test_a_prompt_arrives_as_it_was_typed(venv: Path, tmp_path: Path, prompt: str):
    assert asked(venv, tmp_path, f"PROMPT={prompt}")[-1] == prompt


def test_without_a_python_that_is_new_enough_it_says_what_to_do(tmp_path: Path):
    done = make("run", f"VENV={tmp_path}", "PYTHON=")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stdout
    assert "make run PYTHON=" in done.stdout


def test_continuous_integration_runs_what_a_developer_runs():
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert ci.read_text().splitlines()[-1] == "make test"


def demo(home: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "OMLXD_HOME": str(home)}
    command = [sys.executable, "-m", "omlxd.cli.demo", "hello"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_daemon_that_does_not_start_is_reported(tmp_path: Path):
    (tmp_path / "config.toml").write_text("nonsense = 1\n")
    running = demo(tmp_path)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "unknown key nonsense" in said
    assert "omlxd ended with code 78; see above" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_stopped_takes_its_daemon_along(tmp_path: Path, number: signal.Signals):
    running = demo(tmp_path)
    assert running.stderr is not None
    assert "started omlxd" in running.stderr.readline()
    running.send_signal(number)
    running.communicate(timeout=60)
    assert running.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert not (tmp_path / "omlxd.sock").exists()
    InstanceLock(str(tmp_path / "omlxd.lock"), "1").close()
