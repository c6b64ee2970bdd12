"""Starting the daemon in the background for a command that needs one, and waiting until its socket answers.

Owns the child only until then: it lives in its own session, writes to the home's logs, and outlasts the command. Two
commands that start one at once do no harm: the daemon's own lock lets one of them live, and both talk to that one.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping

from omlxd.cli.console import Console
from omlxd.cli.errors import Unreachable
from omlxd.daemon.paths import Paths
from omlxd.rpc.client import Client, DaemonUnreachable

# -P keeps the current directory out of sys.path: a random.py lying there is not to be run by the daemon.
DAEMON = (sys.executable, "-P", "-m", "omlxd.daemon", "--quiet")
_WAIT_S = 10.0
_GRACE_S = 0.5  # after ours has ended, for another one that has not written its pid yet
_POLL_S = 0.02
_TRIES = 3
_SHOWN_LINES = 5
_SHOWN_BYTES = 4096


def start_daemon(paths: Paths, env: Mapping[str, str], console: Console, command: tuple[str, ...] = DAEMON) -> None:
    """Starts one and returns when the socket answers. Raises Unreachable, with the log's last lines, if none does."""
    output = os.path.join(paths.log_dir, "omlxd.out")
    logs = {path: size_of(path) for path in (paths.log_file, output)}
    end = None
    for _ in range(_TRIES):
        another = _another_lives(paths.lock)
        try:
            os.makedirs(paths.home, mode=0o700, exist_ok=True)
            os.makedirs(paths.log_dir, mode=0o700, exist_ok=True)
            child = _spawn(command, env, output)
        except OSError as error:
            raise Unreachable(f"omlxd cannot be started: {error}; `omlxctl doctor` says more") from error
        console.note(f"starting omlxd in the background (pid {child}, log {paths.log_file})")
        end = _wait(paths, child)
        if end is None or not another or _another_lives(paths.lock):
            break  # else ours gave way to one that was just ending
    if end is not None:
        lines = [line for path, size in logs.items() for line in lines_after(path, size)]
        raise Unreachable(f"omlxd was started and {end}; its log is {paths.log_file}", details=lines[-_SHOWN_LINES:])


def _spawn(command: tuple[str, ...], env: Mapping[str, str], output: str) -> int:
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        command[0],
        command,
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, output, append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,  # the terminal's Ctrl-C and hang-up are not the daemon's
    )


def _wait(paths: Paths, child: int) -> str | None:
    """Waits for the socket. None when it answers, else how it ended."""
    deadline = time.monotonic() + _WAIT_S
    status = None
    while time.monotonic() < deadline:
        if _answers(paths.socket):
            return None
        if status is None and (status := _exit_code(child)) is not None and not _another_lives(paths.lock):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        time.sleep(_POLL_S)
    return f"did not answer within {_WAIT_S:.0f} s" if status is None else f"ended with code {status}"


def _exit_code(child: int) -> int | None:
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def _answers(socket: str) -> bool:
    try:
        Client.connect(socket).close()
    except DaemonUnreachable:
        return False
    return True


def _another_lives(lock: str) -> bool:
    """Whether the lock file names a process that lives. Never tries the lock: that could make the other one fail."""
    try:
        with open(lock, encoding="utf-8", errors="replace") as file:
            holder = re.match(r"pid (\d+)", file.read(200))
        if holder is None:
            return False
        os.kill(int(holder[1]), 0)
    except OSError:
        return False
    return True


def size_of(path: str) -> int:
    """A file's size in bytes, 0 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def lines_after(path: str, size: int) -> list[str]:
    """The last lines of what was written to `path` since it had `size` bytes."""
    try:
        with open(path, "rb") as file:
            file.seek(max(size, size_of(path) - _SHOWN_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-_SHOWN_LINES:]
    except OSError:
        return []
