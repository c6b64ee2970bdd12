"""`omlxd` as its user and launchd see it: a process with messages and exit codes."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import omlxd
from omlxd.daemon.listener import publish
from omlxd.daemon.lock import InstanceLock
from omlxd.rpc.client import Client, DaemonUnreachable
from tests.daemon.process import OMLXD, environment, ping, refused, started, stopped
from tests.models import write


def test_it_tells_its_version_and_its_exit_codes(home: Path):
    run = subprocess.run([*OMLXD, "--version"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, f"omlxd {omlxd.__version__}\n")
    run = subprocess.run([*OMLXD, "--help"], capture_output=True, text=True)
    assert "exit codes: 0 stopped as asked; 1 another daemon" in run.stdout
    assert refused(home, "--nonsense")[0] == 2


@pytest.mark.parametrize(("supervised", "code"), [([], 78), (["--supervised=launchd"], 0)])
def test_bad_settings_are_named_without_a_traceback_and_never_restarted(home: Path, supervised: list[str], code: int):
    (home / "config.toml").write_text("[engine]\nmax_bach = 3\n")
    assert refused(home, *supervised) == (
        code,
        f"omlxd: {home}/config.toml: unknown key engine.max_bach (= 3); the nearest known key is engine.max_batch\n",
    )
    assert os.listdir(home) == ["config.toml"]


def test_torn_settings_stop_the_start(home: Path):
    (home / "config.toml").write_text('[engine]\nmax_batch = 3\n[cache.ssd]\nmax_bytes = "5')
    code, said = refused(home)
    assert (code, "is not valid TOML" in said) == (78, True)


def test_a_bad_variable_stops_the_start(home: Path):
    code, said = refused(home, OMLXD_LOG__LEVEL="loud")
    assert (code, said.count("\n"), "variable OMLXD_LOG__LEVEL: log.level takes one of" in said) == (78, 1, True)


def test_a_socket_path_that_is_too_long_stops_the_start(home: Path):
    code, said = refused(home, OMLXD_SOCKET="/" + "s" * 102)
    assert (code, "has 103 bytes, the most is 102" in said) == (78, True)
    assert os.listdir(home) == []


def test_a_home_that_cannot_be_stops_the_start(home: Path):
    (home / "file").touch()
    code, said = refused(home, "--home", str(home / "file"))
    assert (code, f"{home}/file is not a directory" in said) == (78, True)
    code, said = refused(home, "--home", str(home / "file" / "home"))
    assert (code, said.startswith("omlxd: cannot start: "), str(home / "file") in said) == (78, True, True)


@pytest.mark.parametrize(("supervised", "code"), [([], 1), (["--supervised=launchd"], 0)])
def test_a_second_daemon_says_who_has_the_home(home: Path, supervised: list[str], code: int):
    with InstanceLock(str(home / "omlxd.lock"), "7.0"):
        ended, said = refused(home, *supervised)
    assert ended == code
    assert said.startswith(f"omlxd: already running: a daemon (pid {os.getpid()}, version 7.0) holds {home}/omlxd.lock")


def test_a_second_home_does_not_get_the_socket_of_the_first(home: Path, tmp_path: Path):
    shared = str(tmp_path / "shared" / "o.sock")
    os.mkdir(tmp_path / "shared", 0o700)
    with InstanceLock(f"{shared}.lock", "7.0") as lock, publish(shared, lock):
        code, said = refused(home, OMLXD_SOCKET=shared)
        assert (code, f"holds {shared}.lock" in said) == (1, True)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(shared)
        stranger.listen()
        code, said = refused(home, OMLXD_SOCKET=shared)
        assert (code, "belongs to a running program" in said) == (1, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_stops_when_told_and_leaves_no_socket(home: Path, number: signal.Signals):
    with started(home) as daemon:
        assert ping(home) == "pong"
        assert stopped(daemon, number) == 0
    assert sorted(os.listdir(home)) == ["config.toml", "config.toml.lock", "logs", "omlxd.lock"]
    log = (home / "logs" / "omlxd.log").read_text()
    assert re.search(rf"INFO omlxd\.daemon\.main: omlxd \S+, pid {daemon.pid}, home {home}", log)
    assert log.endswith("stopped\n")


def test_a_model_that_loads_brings_no_word_to_the_terminal_but_the_logs(home: Path):
    write("llama", home / "models" / "tiny")
    with started(home, TRANSFORMERS_NO_ADVISORY_WARNINGS="") as daemon:  # importing mlx-lm has set it for the tests
        with Client.connect(str(home / "omlxd.sock")) as client:
            client.call("models.load", {"model": "tiny"})
        assert stopped(daemon) == 0
        assert daemon.stderr is not None
        said = daemon.stderr.read().splitlines()
    assert any("loaded tiny" in line for line in said)
    assert [line for line in said if not re.match(r"\d{4}-\d\d-\d\d \S+ [A-Z]+ omlxd\.", line)] == []


def test_a_signal_before_the_loop_runs_is_a_stop_too(home: Path):
    daemon = subprocess.Popen(OMLXD, env=environment(home), stderr=subprocess.DEVNULL)
    while not (home / "omlxd.sock").exists():
        assert daemon.poll() is None
    assert stopped(daemon) == 0  # type: ignore[arg-type]
    assert not (home / "omlxd.sock").exists()


@pytest.mark.parametrize("then", ["pass", "raise RuntimeError('Error calling __set_name__')"])
def test_an_import_that_swallows_the_signal_or_makes_another_error_of_it_does_not_hide_it(
    home: Path, tmp_path: Path, then: str
):
    library = tmp_path / "libraries" / "anyio.py"  # the first that is imported once the socket is there
    library.parent.mkdir()
    library.write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n    while True: pass\n"
        f"except BaseException:\n    {then}\n"
    )
    env = {**environment(home), "PYTHONPATH": str(library.parent)}
    assert subprocess.run(OMLXD, env=env, stderr=subprocess.DEVNULL, timeout=30, check=False).returncode == 0
    assert not (home / "omlxd.sock").exists()


def test_after_a_kill_the_next_one_serves_whatever_the_lock_says(home: Path):
    with started(home) as daemon:
        daemon.kill()
        daemon.wait()
        assert (home / "omlxd.sock").exists()
        with pytest.raises(DaemonUnreachable):
            ping(home)
        (home / "omlxd.lock").write_text(f"pid {os.getpid()}, version 0\n")
        with started(home):
            assert ping(home) == "pong"


def test_a_second_start_leaves_the_first_at_work(home: Path):
    with started(home) as daemon, Client.connect(str(home / "omlxd.sock")) as client:
        code, said = refused(home)
        assert (code, f"pid {daemon.pid}" in said) == (1, True)
        assert client.call("daemon.info")["pid"] == daemon.pid
        assert ping(home) == "pong"


def test_with_an_open_umask_everything_in_the_home_is_the_users_alone(home: Path):
    with started(home / "new", umask=0):
        places = [home / "new", *(home / "new").rglob("*")]
        modes = {str(place): stat.S_IMODE(place.stat().st_mode) & 0o077 for place in places}
    assert set(modes.values()) == {0}, modes
    assert len(modes) >= 5


def test_a_daemon_in_the_background_logs_to_its_file_alone_as_json_if_asked(home: Path):
    env = environment(home)
    command = [*OMLXD, "--supervised=launchd", "--log-json"]
    daemon = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    while not (home / "omlxd.sock").exists():
        assert daemon.poll() is None
    with Client.connect(str(home / "omlxd.sock")) as client:
        assert client.call("daemon.shutdown") is True
    assert daemon.communicate(timeout=30) == (None, "")
    assert daemon.returncode == 0
    lines = [json.loads(line) for line in (home / "logs" / "omlxd.log").read_text().splitlines()]
    assert lines[-1]["message"] == "stopped"


def test_a_bug_at_the_start_is_logged_has_a_code_of_its_own_and_leaves_no_socket(home: Path, tmp_path: Path):
    (tmp_path / "jsonrpcserver.py").write_text("raise RuntimeError('broken installation')\n")
    code, said = refused(home, PYTHONPATH=str(tmp_path))
    assert (code, "RuntimeError: broken installation" in said) == (70, True)
    assert said.split("Traceback")[0].endswith("ERROR omlxd.daemon.main: the daemon failed\n")
    assert "broken installation" in (home / "logs" / "omlxd.log").read_text()
    assert not (home / "omlxd.sock").exists()


def test_the_way_to_the_socket_imports_nothing_that_takes_long():
    code = "import sys; import omlxd.daemon.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    slow = {
        "mlx",
        "mlx_lm",
        "mlx_vlm",
        "transformers",
        "cv2",
        "datasets",
        "numpy",
        "anyio",
        "asyncio",
        "tomlkit",
        "rich",
    }
    assert slow & set(loaded) == set()


def test_a_daemon_without_a_model_has_not_loaded_mlx(home: Path):
    code = "import sys, omlxd.daemon.run, omlxd.daemon.service; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    assert "omlxd.rpc.server" in loaded
    assert {"mlx", "mlx.core", "mlx_lm", "mlx_vlm", "transformers", "cv2", "datasets"} & set(loaded) == set()
