"""A command that needs a daemon starts the real one, says so, and talks to it."""

import re
import socket
from collections.abc import Iterator

import pytest

from tests.cli.running import Home


@pytest.fixture
def alone(home: Home) -> Iterator[Home]:
    """A home whose daemon, if one was started, is stopped and gone afterwards. Sees no models of this machine."""
    home.env["HF_HUB_CACHE"] = str(home.path / "none")
    yield home
    with socket.socket(socket.AF_UNIX) as watching:
        if watching.connect_ex(home.socket) == 0:
            home.run("shutdown", "--grace", "0")
            assert watching.recv(1) == b""


def test_the_daemon_is_started_once_and_announced_on_standard_error(alone: Home) -> None:
    first = alone.run("models", "--json")
    assert (first.code, first.document) == (0, [])
    [line] = first.errors
    assert re.fullmatch(rf"starting omlxd in the background \(pid \d+, log {alone.path}/logs/omlxd\.log\)", line)
    assert alone.run("models", "--json").errors == []
    assert alone.run("status", "--json").document["info"]["home"] == str(alone.path)
    assert (alone.path / "logs" / "omlxd.out").read_text() == ""


@pytest.mark.parametrize("arguments", [("models",), ("config", "set", "log.level", "debug")])
def test_what_is_made_on_the_way_to_the_home_is_private_whatever_the_umask(
    alone: Home, arguments: tuple[str, ...]
) -> None:
    alone.env["OMLXD_HOME"] = str(alone.path / "upper" / "home")
    alone.socket = str(alone.path / "upper" / "home" / "omlxd.sock")
    with alone.start(*arguments, umask=0) as process:
        process.communicate(timeout=60)
    assert process.returncode == 0
    made = [alone.path, *alone.path.rglob("*")]
    assert [path for path in made if path.stat().st_mode & 0o077] == []


def test_quiet_starts_it_without_a_word(alone: Home) -> None:
    outcome = alone.run("models", "--quiet")
    assert (outcome.code, outcome.err) == (0, b"")


def test_socket_and_environment_reach_the_daemon_that_is_started(alone: Home) -> None:
    other = str(alone.path.with_name("other.sock"))
    assert alone.run("models", "--socket", other).code == 0
    assert alone.run("status", "--json", "--socket", other).document["info"]["socket"] == other
    assert alone.run("ping").code == 3
    alone.socket = other
    alone.env["OMLXD_SOCKET"] = other


def test_two_commands_at_once_share_one_daemon(alone: Home) -> None:
    both = [alone.start("models", "--json") for _ in range(2)]
    for process in both:
        with process:
            assert process.communicate(timeout=60)[0] == b"[]\n"
        assert process.returncode == 0
    log = (alone.path / "logs" / "omlxd.log").read_text()
    assert log.count("ready at") == 1


def test_a_stale_socket_is_no_obstacle(alone: Home) -> None:
    alone.path.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(alone.socket)
    assert alone.run("models").code == 0


def test_a_daemon_that_cannot_start_is_code_3_with_its_reason(alone: Home) -> None:
    alone.path.mkdir(mode=0o700)
    (alone.path / "config.toml").write_text("[engine]\nmax_bach = 8\n")
    outcome = alone.run("models", "--json")
    assert outcome.code == 3
    assert "omlxd was started and ended with code 78" in outcome.document["error"]["message"]
    assert any("max_bach" in line and "engine.max_batch" in line for line in outcome.errors)


def test_stdio_starts_it_for_an_editor(alone: Home) -> None:
    outcome = alone.run("stdio", "--quiet", stdin=b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n')
    assert (outcome.code, outcome.err) == (0, b"")
    assert b'"pong"' in outcome.out
