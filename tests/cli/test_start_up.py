"""What `omlxctl` costs and loads before it does anything, and what holds for every command without a daemon."""

import os
import subprocess
import sys

import pytest

from omlxd.cli.main import COMMANDS
from tests.cli.running import OMLXCTL, Home

HEAVY = {
    "mlx", "mlx_lm", "mlx_vlm", "transformers", "numpy", "asyncio", "anyio", "msgspec", "jsonrpcserver", "rich",
    "huggingface_hub", "logging", "subprocess", "dataclasses", "typing", "shutil", "tomllib",
}  # fmt: skip
# A command line for each command that is complete, so that only the missing daemon stops it.
COMPLETE = {
    "run": ["m", "hi"], "chat": ["m"], "complete": ["m", "hi"], "pull": ["demo"], "load": ["m"], "unload": ["m"],
    "tokenize": ["m", "hi"], "rpc": ["ping"], "config": ["path"], "completion": ["bash"], "service": ["status"],
    "cache": ["stats"], "session": ["list"], "pin": ["m"], "unpin": ["m"], "rm": ["m"], "bench": ["m"],
}  # fmt: skip
NEED_A_DAEMON = sorted(set(COMMANDS) - {"socket", "config", "doctor", "completion", "service"})


def modules_after(home: Home, *arguments: str) -> set[str]:
    code = "import sys; from omlxd.cli.main import main; main(); print(*sys.modules, file=sys.stderr)"
    process = subprocess.run([sys.executable, "-c", code, *arguments], env=home.env, capture_output=True, text=True)
    return set(process.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("command", ["ping", "status", "ps", "models", "socket"])
def test_the_quick_commands_load_nothing_heavy(home: Home, command: str) -> None:
    assert not modules_after(home, command, "--no-start") & HEAVY


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_no_command_loads_mlx_an_event_loop_or_the_engine(home: Home, name: str) -> None:
    loaded = modules_after(home, name, "--no-start", *COMPLETE.get(name, []))
    assert not loaded & {"mlx", "mlx_lm", "transformers", "asyncio", "anyio"}
    assert not [module for module in loaded if module.startswith(("omlxd.engine", "omlxd.cache"))]


@pytest.mark.parametrize("name", NEED_A_DAEMON)
def test_without_a_daemon_and_not_allowed_to_start_one_the_code_is_3_and_one_line_says_why(
    home: Home, name: str
) -> None:
    outcome = home.run(name, "--no-start", *COMPLETE.get(name, []))
    assert outcome.code == 3
    assert outcome.out == b""
    [line] = outcome.errors
    assert line.startswith(f"error: no daemon answers at {home.socket}: there is no socket; ")
    assert not home.path.exists()


@pytest.mark.parametrize("name", NEED_A_DAEMON)
def test_with_json_the_missing_daemon_is_the_one_document(home: Home, name: str) -> None:
    outcome = home.run(name, "--json", "--no-start", *COMPLETE.get(name, []))
    assert outcome.code == 3
    error = outcome.document["error"]
    assert (error["code"], error["data"]) == (3, {"kind": "unreachable"})
    assert "no daemon answers" in error["message"]


@pytest.mark.parametrize("flags", [["--json", "--no-start"], ["--no-start", "--json"]])
def test_global_flags_stand_before_or_after_the_command(home: Home, flags: list[str]) -> None:
    first, second = flags
    assert home.run(first, "ping", second).document["error"]["code"] == 3


def test_socket_names_another_daemon_before_and_after_the_command(home: Home) -> None:
    assert home.run("--socket", "/tmp/other.sock", "socket").text == "/tmp/other.sock\n"
    assert home.run("socket", "--socket=/tmp/other.sock").text == "/tmp/other.sock\n"
    assert home.run("socket").text == f"{home.socket}\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["--wrong"], ["pnig"], ["ping", "--wrong"], ["ping", "word"], ["load"], ["run", "--max-tokens", "many"],
     ["run", "--temperature", "nan"], ["config", "get"], ["config", "raise"], ["completion", "tcsh"],
     ["rpc", "ping", "{"], ["rpc", "ping", "5"], ["config", "set", "models.defalt", "x"],
     ["config", "set", "engine.max_batch", "many"], ["config", "get", "models.defalt"], ["--socket"]],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("json", [False, True])
def test_a_wrong_command_line_is_code_2_and_one_line_without_a_daemon(
    home: Home, arguments: list[str], json: bool
) -> None:
    outcome = home.run(*arguments, *(["--json"] if json else []))
    if json:
        assert outcome.document["error"]["code"] == 2
    else:
        assert outcome.out == b""
    assert outcome.code == 2
    assert len(outcome.errors) == 1


def test_a_mistyped_command_is_told_the_nearest_one(home: Home) -> None:
    assert home.run("pnig").errors == ["error: no command 'pnig'; did you mean ping?"]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_help_says_what_the_command_takes(home: Home, name: str) -> None:
    outcome = home.run(*name.split(), "--help")
    assert outcome.code == 0
    assert outcome.text.startswith(f"usage: omlxctl {name}".rstrip())
    assert "--json" in outcome.text
    assert outcome.err == b""


def test_the_version_is_printed_with_and_without_a_command(home: Home) -> None:
    from omlxd import __version__

    assert home.run("--version").text == home.run("ping", "--version").text == f"omlxctl {__version__}\n"
    assert home.run("--json", "--version").document == {"version": __version__}


def test_a_socket_path_that_is_too_long_names_the_limit(home: Home) -> None:
    outcome = home.run("ping", "--socket", "/tmp/" + "x" * 120)
    assert outcome.code == 3
    assert "102" in outcome.errors[0]


def test_help_into_a_closed_pipe_ends_silently(home: Home) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with home.start("--help", stdout=writer) as process:
        os.close(writer)
        err = process.stderr.read()
    assert (process.returncode, err) == (141, b"")


def test_a_full_disk_under_standard_output_is_one_line_and_code_1(home: Home) -> None:
    with open("/dev/full", "wb") as full, home.start("--json", "socket", stdout=full) as process:
        err = process.stderr.read()
    assert (process.returncode, err) == (1, b"error: cannot write the output: No space left on device\n")


def test_a_closed_standard_output_is_not_taken_for_the_socket(home: Home) -> None:
    command = 'exec "$@" >&-'
    done = subprocess.run(["bash", "-c", command, "-", *OMLXCTL, "socket"], env=home.env, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
