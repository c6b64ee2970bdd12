"""`omlxctl doctor`: looks at everything the daemon needs and says what to do about what is wrong.

Only reads; starts no daemon and repairs nothing. Main thread only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
from collections.abc import Iterator, Mapping

from omlxd import __version__
from omlxd.cli.context import ANSWER_WITHIN_S, PROTOCOL, Context
from omlxd.cli.errors import DONE, REFUSED, CliError, Unreachable
from omlxd.cli.packages import required_packages
from omlxd.cli.parser import Parser
from omlxd.cli.tables import size
from omlxd.daemon.paths import Paths, SocketPathTooLong
from omlxd.rpc.client import DaemonUnreachable, NotRunning, RpcError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SPACE_FOR_A_MODEL = 2_000_000_000


class Finding:
    """What one check found: `level` is ok, warn or fail; `advice` says what to do, for the latter two."""

    __slots__ = ("advice", "check", "level", "message")

    def __init__(self, level: str, check: str, message: str, advice: str = "") -> None:
        self.level, self.check, self.message, self.advice = level, check, message, advice

    def as_dict(self) -> dict[str, str]:
        return {"check": self.check, "level": self.level, "message": self.message, "advice": self.advice}


class Doctor:
    """Exit code 1 when a check failed; warnings alone leave it 0."""

    def arguments(self, parser: Parser) -> None:
        pass

    def run(self, context: Context, given: argparse.Namespace) -> int:
        findings = list(_findings(context))
        failed = [finding for finding in findings if finding.level == "fail"]
        console = context.console
        if console.json:
            report: dict[str, Any] = {"ok": not failed, "findings": [finding.as_dict() for finding in findings]}
            if failed:
                message = "; ".join(f"{finding.check}: {finding.message}" for finding in failed)
                report["error"] = {"code": REFUSED, "message": message, "data": {"kind": "unhealthy"}}
            console.document(report)
        else:
            for finding in findings:
                console.line(f"{finding.level:<4}  {finding.check:<8}  {finding.message}")
                if finding.advice:
                    console.line(f"{'':<16}{finding.advice}")
        return REFUSED if failed else DONE


def _findings(context: Context) -> Iterator[Finding]:
    yield _home(context.paths)
    yield from _socket(context.paths)
    yield from _settings_and_disk(context)
    yield from _packages()
    yield from _daemon(context)


def _home(paths: Paths) -> Finding:
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


def _socket(paths: Paths) -> Iterator[Finding]:
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


def _settings_and_disk(context: Context) -> Iterator[Finding]:
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


def _packages() -> Iterator[Finding]:
    packages = required_packages()
    wrong = [package for package in packages if not package.fits]
    for package in wrong:
        message = f"{package.name} {package.installed or 'is missing'}, needed: {package.wanted}"
        yield Finding("fail", "packages", message, f"pip install '{package.wanted}' in this environment")
    if not wrong:
        yield Finding("ok", "packages", ", ".join(f"{package.name} {package.installed}" for package in packages))


def _daemon(context: Context) -> Iterator[Finding]:
    try:
        with context.connect() as client:
            info = client.call("daemon.info", timeout_s=ANSWER_WITHIN_S)
            yield _version(info)
            yield Finding("ok", "device", f"{info['device']} on {info['platform']}, mlx {info['mlx']}")
            yield from _models(client.call("models.list", timeout_s=ANSWER_WITHIN_S))
    except NotRunning:
        yield Finding("warn", "daemon", "none runs", "commands that need one start it; `omlxd` runs one here")
    except (DaemonUnreachable, Unreachable) as error:
        advice = f"read {context.paths.log_file}; if the daemon hangs, end it: {context.paths.lock} has its pid"
        yield Finding("fail", "daemon", str(error), advice)
    except RpcError as error:
        yield Finding("fail", "daemon", f"answers with an error: {error.message}", f"read {context.paths.log_file}")


def _version(info: Mapping[str, Any]) -> Finding:
    answers = f"omlxd {info['version']}, pid {info['pid']}, protocol {info['protocol']}"
    advice = "`omlxctl shutdown`; the next command starts the installed version"
    if info["protocol"] != PROTOCOL:
        return Finding("fail", "daemon", f"{answers}; this omlxctl {__version__} speaks {PROTOCOL}", advice)
    if info["version"] != __version__:
        return Finding("warn", "daemon", f"{answers}; this is omlxctl {__version__}", advice)
    return Finding("ok", "daemon", answers)


def _models(entries: list[Mapping[str, Any]]) -> Iterator[Finding]:
    broken = [entry for entry in entries if entry.get("error")]
    for entry in broken:
        reason = " ".join(str(entry["error"]).split())
        yield Finding("warn", "models", f"{entry['name']}: {reason}", f"mend or remove {entry['path']}")
    usable = len(entries) - len(broken)
    if usable:
        yield Finding("ok", "models", f"{usable} usable")
    else:
        yield Finding("warn", "models", "none usable", "`omlxctl pull demo` fetches a small one")
