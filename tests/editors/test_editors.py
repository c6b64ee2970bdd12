"""docs/editors.md, run: each snippet as it stands there, in the real client, against a real daemon.

The model is a tiny one under the demo model's name, which counts for as long as it is let. Clients that are not
installed are skipped with their name; `.ci/run` installs them all.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.living import Daemon, daemon_in_new_home, until
from tests.models import END_OF_TEXT, SPECIAL, write_scripted
from tests.snippets import snippets

MODEL: Final = "SmolLM2-135M-Instruct"
CODER: Final = "coder"
FIM: Final = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
MIDDLE: Final = "return a + b\n"
WAVE: Final = "\U0001f44b "  # four bytes in UTF-8, two units in UTF-16: who counts anything but bytes loses the frame
BEGINNING: Final = WAVE + "1 2 3 4 5 6 7 8 "
SNIPPETS: Final = snippets("editors.md")
WAIT_S: Final = 60


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with daemon_in_new_home() as living:
        write_counting(living.models / MODEL)
        write_counting(living.models / CODER)
        living.start()
        yield living


@pytest.fixture(autouse=True)
def nothing_is_left(daemon: Daemon) -> Iterator[None]:
    """Whatever a client asked for has ended with it."""
    yield
    until(lambda: daemon.live() == 0)


def write_counting(directory: Path) -> None:
    """A model that waves and counts, and begins again; nothing that it says ends it. It fills in one middle."""
    write_scripted(directory, [WAVE, *(f"{number} " for number in range(1, 57)), *FIM, MIDDLE])
    for file, key, end in (("config.json", "eos_token_id", END_OF_TEXT), ("tokenizer_config.json", "eos_token", None)):
        path = directory / file
        path.write_text(json.dumps({**json.loads(path.read_text()), key: end or SPECIAL[END_OF_TEXT]}))


class Shell:
    """Runs commands where `omlxctl` is found and finds the daemon."""

    def __init__(self, home: Path, env: dict[str, str]) -> None:
        self.path = home
        self._env = env

    def run(self, *command: str) -> str:
        """Standard output and error together."""
        done = subprocess.run(
            command, env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, encoding="utf-8", timeout=WAIT_S, cwd=self.path,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def watch(self, daemon: Daemon, *command: str) -> str:
        """The first line of a command that tells of events for ever, while a model comes and goes."""
        with coming_and_going(daemon), subprocess.Popen(command, env=self._env, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            try:
                return process.stdout.readline().decode()
            finally:
                process.kill()

    def file(self, name: str, *parts: str) -> str:
        path = self.path / name
        path.write_text("\n".join(parts), encoding="utf-8")
        return str(path)


@contextmanager
def coming_and_going(daemon: Daemon) -> Iterator[None]:
    """Loads and unloads a model again and again: when a client has begun to listen, it cannot say."""
    ended = threading.Event()

    def toggle() -> None:
        while not ended.is_set():
            daemon.call("models.load", model=CODER)
            daemon.call("models.unload", model=CODER)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def shell(daemon: Daemon, tmp_path: Path) -> Shell:
    commands = tmp_path / "bin"
    commands.mkdir()
    omlxctl = commands / "omlxctl"
    run = "import sys; from omlxd.cli.main import main; sys.exit(main())"
    # Not Python in the first line: that may not hold a space, nor more than some hundred bytes.
    omlxctl.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(run)} "$@"\n')
    omlxctl.chmod(0o755)
    path = os.pathsep.join([str(commands), os.environ["PATH"]])
    return Shell(tmp_path, {**daemon.home.env, "PATH": path, "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"})


def need(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed; .ci/run says how")
    return found


# -- vscode-jsonrpc ---------------------------------------------------------------------------------------------------


def node(shell: Shell, task: str) -> tuple[str, str]:
    program = need("node")
    looked = subprocess.run([program, "-e", "require('vscode-jsonrpc/node')"], capture_output=True)
    if looked.returncode:
        pytest.skip("node finds no vscode-jsonrpc (npm install it, and name its node_modules in NODE_PATH)")
    return program, shell.file("chat.js", SNIPPETS["vscode connect"], SNIPPETS[f"vscode {task}"])


def test_vscode_jsonrpc_streams_a_chat(shell: Shell) -> None:
    said = shell.run(*node(shell, "chat"))
    assert said.startswith(BEGINNING)
    assert said.endswith("400 tokens, length\n")


def test_vscode_jsonrpc_cancels(shell: Shell) -> None:
    assert shell.run(*node(shell, "cancel")).startswith(f"-32800: {WAVE}")


def test_vscode_jsonrpc_fills_in(shell: Shell) -> None:
    assert shell.run(*node(shell, "fim")).startswith(MIDDLE)


def test_vscode_jsonrpc_hears_events(shell: Shell, daemon: Daemon) -> None:
    assert shell.watch(daemon, *node(shell, "events")).startswith("coder is ")


# -- Neovim -----------------------------------------------------------------------------------------------------------

NVIM_END: Final = """
assert(vim.wait(50000, function() return omlxd.said ~= nil end, 5), "no end came")
vim.fn.writefile(vim.api.nvim_buf_get_lines(0, 0, -1, true), "buffer")
vim.fn.writefile(vim.split(omlxd.said, "\\n"), "said")
vim.cmd("qall!")
"""


def nvim(shell: Shell, program: str, client: str, task: str) -> tuple[str, str]:
    """What is in the buffer at the end, and what was said of it."""
    script = shell.file("chat.lua", SNIPPETS[f"{client} connect"], SNIPPETS[f"{client} {task}"], NVIM_END)
    shell.run(program, "--headless", "-u", "NONE", "-i", "NONE", "-c", f"luafile {script}", "-c", "cquit")
    return (shell.path / "buffer").read_text(), (shell.path / "said").read_text()


def nvim_that_connects() -> str:
    """A Neovim of at least 0.10: the one that TEST_NVIM names, else the one on the path."""
    for program in (os.environ.get("TEST_NVIM"), shutil.which("nvim")):
        if program and version(program) >= (0, 10):
            return program
    pytest.skip("no Neovim of at least 0.10, whose vim.lsp.rpc.connect takes a path; TEST_NVIM can name one")


def version(program: str) -> tuple[int, int]:
    first = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    major, minor = first.lstrip("v").split(".")[:2]
    return int(major), int(minor)


def test_neovim_streams_a_chat_into_its_buffer(shell: Shell) -> None:
    buffer, said = nvim(shell, nvim_that_connects(), "nvim", "chat")
    assert buffer.startswith(BEGINNING)
    assert said == "length\n"


def test_neovim_cancels(shell: Shell) -> None:
    _, said = nvim(shell, nvim_that_connects(), "nvim", "cancel")
    assert said == "-32800\n"


def test_neovim_fills_in(shell: Shell) -> None:
    _, said = nvim(shell, nvim_that_connects(), "nvim", "fim")
    assert said.startswith(MIDDLE)


def test_neovim_hears_events(shell: Shell, daemon: Daemon) -> None:
    with coming_and_going(daemon):
        _, said = nvim(shell, nvim_that_connects(), "nvim", "events")
    assert said.startswith("coder is ")


def test_an_old_neovim_fills_in(shell: Shell) -> None:
    _, said = nvim(shell, need("nvim"), "nvim-old", "fim")
    assert said.startswith(MIDDLE)


def test_an_old_neovim_hears_events(shell: Shell, daemon: Daemon) -> None:
    with coming_and_going(daemon):
        _, said = nvim(shell, need("nvim"), "nvim-old", "events")
    assert said.startswith("coder is ")


def test_an_old_neovim_streams_a_chat_into_its_buffer(shell: Shell) -> None:
    buffer, said = nvim(shell, need("nvim"), "nvim-old", "chat")
    assert buffer.startswith(BEGINNING)
    assert said == "length\n"


def test_an_old_neovim_cancels(shell: Shell) -> None:
    _, said = nvim(shell, need("nvim"), "nvim-old", "cancel")
    assert said.startswith(f"-32800: {WAVE}")


# -- Emacs ------------------------------------------------------------------------------------------------------------


def emacs(shell: Shell, task: str) -> str:
    """What Emacs says and then has in the buffer."""
    script = shell.file("chat.el", SNIPPETS["emacs connect"], SNIPPETS[f"emacs {task}"], "(princ (buffer-string))")
    return shell.run(need("emacs"), "-Q", "--batch", "--load", script)


def test_emacs_streams_a_chat_into_its_buffer(shell: Shell) -> None:
    said = emacs(shell, "chat")
    assert "length\n" in said
    assert BEGINNING in said


def test_emacs_cancels(shell: Shell) -> None:
    assert f"-32800: {WAVE}" in emacs(shell, "cancel")


def test_emacs_fills_in(shell: Shell) -> None:
    assert MIDDLE in emacs(shell, "fim")


def test_emacs_hears_events(shell: Shell, daemon: Daemon) -> None:
    with coming_and_going(daemon):
        assert "coder is " in emacs(shell, "events")


# -- the shell --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["nc", "socat"])
def test_a_shell_streams_a_chat(shell: Shell, program: str) -> None:
    need(program)
    *notes, answer = map(json.loads, shell.run("sh", "-c", SNIPPETS[f"{program} chat"]).splitlines())
    values = [note["params"]["value"] for note in notes]
    text = "".join(value["text"] for value in values if value["kind"] == "delta")
    assert text.startswith(BEGINNING)
    assert (answer["id"], answer["result"]["text"]) == (1, text)


def test_a_shell_cancels(shell: Shell) -> None:
    need("nc")
    answer = json.loads(shell.run(need("bash"), "-c", SNIPPETS["nc cancel"]))
    assert (answer["id"], answer["error"]["code"]) == ("story", -32800)
    assert answer["error"]["data"]["partial"]["finish_reason"] == "cancelled"


def test_a_shell_fills_in(shell: Shell) -> None:
    need("nc")
    answer = json.loads(shell.run("sh", "-c", SNIPPETS["nc fim"]))
    assert answer["result"]["text"].startswith(MIDDLE)


def test_a_shell_hears_events(shell: Shell, daemon: Daemon) -> None:
    need("nc")
    subscribed = SNIPPETS["nc events"].rstrip() + " | grep --line-buffered '\"event\"'\n"
    event = json.loads(shell.watch(daemon, "sh", "-c", subscribed))
    assert (event["method"], event["params"]["model"]) == ("event", CODER)


# -- Python -----------------------------------------------------------------------------------------------------------


def python(shell: Shell, task: str) -> str:
    return shell.run(sys.executable, "-c", SNIPPETS[f"python {task}"])


def test_python_streams_a_chat(shell: Shell) -> None:
    assert python(shell, "chat").startswith(BEGINNING)


def test_python_cancels(shell: Shell) -> None:
    assert python(shell, "cancel").startswith(f"cancelled {WAVE}")


def test_python_fills_in(shell: Shell) -> None:
    assert python(shell, "fim").startswith(MIDDLE)


def test_python_hears_events(shell: Shell, daemon: Daemon) -> None:
    assert shell.watch(daemon, sys.executable, "-c", SNIPPETS["python events"]).startswith("coder is ")


def test_every_snippet_is_run() -> None:
    """So that a new one finds its test."""
    clients = {name.split()[0] for name in SNIPPETS}
    assert clients == {"vscode", "nvim", "nvim-old", "emacs", "nc", "socat", "python"}
    assert {name.split()[1] for name in SNIPPETS} == {"connect", "chat", "cancel", "fim", "events"}
