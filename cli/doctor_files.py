"""The checks of `omlxctl doctor` on files: home, socket, lock, settings, disk. They only read. Main thread only."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator

from omlxd.cli.context import Context
from omlxd.cli.errors import CliError
from omlxd.cli.finding import Finding
from omlxd.cli.tables import size
from omlxd.daemon.paths import Paths, SocketPathTooLong
from omlxd.rpc.client import DaemonUnreachable

_SPACE_FOR_A_MODEL = 2_000_000_000


def check_home(paths: Paths) -> Finding:
    home = paths.home
    try:
        state = os.lstat(home)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            return Finding("ok", "home", f"{home} does not exist yet; the daemon makes it")
        return Finding("fail", "home", f"{home}: {error.strerror}", "set OMLXD_HOME to a directory of your own")
    if not stat.S_ISDIR(state.st_mode):
        return Finding("fail", "home", f"{home} is not a directory", "move it away, or set OMLXD_HOME to another place")
    if state.st_uid != os.getuid():
        message = f"{home} belongs to user {state.st_uid}, not to {os.getuid()}"
        return Finding("fail", "home", message, "set OMLXD_HOME to a directory of your own")
    if state.st_mode & 0o077:
        message = f"{home} is open to others (mode {stat.S_IMODE(state.st_mode):04o}, not 0700)"
        return Finding("fail", "home", message, f"chmod 700 {home}")
    return Finding("ok", "home", f"{home}, mode 0700, yours")


def check_socket(paths: Paths) -> Iterator[Finding]:
    try:
        paths.check_socket()
    except SocketPathTooLong as error:
        message, _, advice = str(error).partition("; ")
        yield Finding("fail", "socket", message, advice)
        return
    try:
        state = os.lstat(paths.socket)
    except OSError:
        yield Finding("ok", "socket", f"{paths.socket}, not there while no daemon runs")
        return
    if not stat.S_ISSOCK(state.st_mode):
        yield Finding("fail", "socket", f"{paths.socket} is not a socket", "move it away")
    elif state.st_mode & 0o077 or state.st_uid != os.getuid():
        message = f"{paths.socket} is open to others or not yours (mode {stat.S_IMODE(state.st_mode):04o})"
        yield Finding("fail", "socket", message, "`omlxctl shutdown`; the daemon makes a private one when it starts")
    else:
        yield Finding("ok", "socket", f"{paths.socket}, mode 0600")


def check_lock(context: Context) -> Iterator[Finding]:
    """Whether a daemon holds the home and does not answer. Never tries the lock: that could stop one from starting."""
    for path in (context.paths.lock, f"{context.paths.socket}.lock"):
        pid = _pid_in(path)
        if pid is None:
            continue
        if not _lives(pid):
            yield Finding("ok", "lock", f"{path} was left by pid {pid}, which has gone; the next daemon takes it over")
        elif _is_listening(context):
            yield Finding("ok", "lock", f"{path}, pid {pid}")
        else:
            message = f"{path} names pid {pid}, which lives, and nobody listens at {context.paths.socket}"
            advice = f"`ps -p {pid}`: an omlxd that hangs is ended by kill -9 {pid}; another program does no harm"
            yield Finding("warn", "lock", message, advice)


def _pid_in(path: str) -> int | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            match = re.match(r"pid (\d+)", file.read(200))
    except OSError:
        return None
    return None if match is None else int(match[1])


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_listening(context: Context) -> bool:
    try:
        context.connect().close()
    except (DaemonUnreachable, CliError):
        return False
    return True


def check_settings_and_disk(context: Context) -> Iterator[Finding]:
    try:
        settings = context.settings()
    except CliError as error:
        message, _, advice = error.message.partition("; ")
        yield Finding("fail", "settings", message, advice or "`omlxctl config show` lists what there is")
        return
    yield Finding("ok", "settings", context.paths.config)
    place = context.paths.home
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    free = shutil.disk_usage(place).free
    keep = settings.cache.ssd.min_free_bytes if settings.cache.ssd.enabled else 0
    if free < _SPACE_FOR_A_MODEL:
        yield Finding("warn", "disk", f"{size(free)} free at {place}", "make room: models and the cache need some")
    elif free < keep:
        message = f"{size(free)} free at {place}, and cache.ssd.min_free_bytes keeps {size(keep)}"
        yield Finding("warn", "disk", message, "make room or lower that setting; until then nothing is cached on disk")
    else:
        yield Finding("ok", "disk", f"{size(free)} free at {place}")
