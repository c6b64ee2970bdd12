"""Where the home and the socket are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd.daemon.paths import MAX_SOCKET_BYTES, Paths, SocketPathTooLong


def test_the_home_is_a_short_directory_of_the_user():
    paths = Paths.from_env({"HOME": "/Users/ada"})
    assert paths.home == "/Users/ada/.omlxd"
    assert paths.socket == "/Users/ada/.omlxd/omlxd.sock"
    assert paths.config == "/Users/ada/.omlxd/config.toml"
    assert paths.log_file == "/Users/ada/.omlxd/logs/omlxd.log"


def test_home_and_socket_can_be_set():
    assert Paths.from_env({"OMLXD_HOME": "/srv/omlxd"}).socket == "/srv/omlxd/omlxd.sock"
    assert Paths.from_env({"OMLXD_HOME": "/srv/omlxd", "OMLXD_SOCKET": "/run/o.sock"}).socket == "/run/o.sock"


def test_a_tilde_is_the_users_home_without_a_shell():
    assert Paths.from_env({"HOME": "/Users/ada", "OMLXD_HOME": "~/o"}).home == "/Users/ada/o"


def test_an_empty_variable_counts_as_unset():
    assert Paths.from_env({"HOME": "/Users/ada", "OMLXD_HOME": "", "OMLXD_SOCKET": ""}).home == "/Users/ada/.omlxd"


def test_a_process_without_home_asks_the_user_database():
    assert os.path.isabs(Paths.from_env({}).home)


def test_relative_paths_survive_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    paths = Paths.from_env({"OMLXD_HOME": "state", "OMLXD_SOCKET": "o.sock"})
    monkeypatch.chdir("/")
    assert paths.home == str(tmp_path / "state")
    assert paths.socket == str(tmp_path / "o.sock")


@pytest.mark.parametrize("num_bytes", [103, 104, 108, 120])
def test_a_socket_path_over_102_bytes_is_refused_with_its_length_and_the_limit(num_bytes: int):
    paths = Paths("/h", "/" + "s" * (num_bytes - 1))
    with pytest.raises(
        SocketPathTooLong, match=rf"{num_bytes} bytes, the most is {MAX_SOCKET_BYTES}; set OMLXD_SOCKET"
    ):
        paths.check_socket()


def test_a_socket_path_of_102_bytes_is_taken():
    Paths("/h", "/" + "s" * 101).check_socket()


def test_bytes_are_counted_not_characters():
    with pytest.raises(SocketPathTooLong, match="121 bytes"):
        Paths("/h", "/" + "é" * 60).check_socket()


def test_importing_the_paths_costs_the_command_line_nothing():
    slow = "{'dataclasses', 'pathlib', 'typing', 'tomllib'}"
    code = f"import sys; import omlxd.daemon.paths; print({slow} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env={"PYTHONPATH": "src"})
    assert (done.stdout, done.stderr) == ("set()\n", "")
