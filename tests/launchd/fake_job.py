"""One job of the fake launchd: its process, its sockets, when it is started again, and what `print` says of it.

Rules and wording as PLATFORM.md has them. Every method is called with the fake's lock held.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EX_CONFIG = 78
MIN_THROTTLE_S, MAX_THROTTLE_S = 10.0, 1200.0
CRASHES = {signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGSYS}


class Job:
    """A property list that was loaded, and the process that comes of it."""

    def __init__(self, domain: str, path: str, plist: Mapping[str, Any], *, preload: Path | None) -> None:
        self.domain, self.path, self.plist = domain, path, plist
        self.label: str = plist["Label"]
        self.process: subprocess.Popen[bytes] | None = None
        self.runs = 0
        self.last_exit = "(never exited)"
        self.last_signal: str | None = None
        self.due_at: float | None = None
        self.kill_at: float | None = None
        self.removing = False
        self.again = False
        self._started_at: float | None = None
        self._short_lives = 0
        self._preload = preload
        self._sockets = {name: _listening(entry) for name, entry in plist.get("Sockets", {}).items()}

    # -- starting -----------------------------------------------------------------------------------------------------

    @property
    def starts_at_load(self) -> bool:
        return bool(self.plist.get("RunAtLoad") or self.plist.get("KeepAlive"))

    def schedule(self, now: float) -> None:
        """As soon as the throttle allows; nothing shortens it."""
        self.due_at = now if self._started_at is None else max(now, self._started_at + self._throttle_s())

    def spawn(self, now: float, env: Mapping[str, str]) -> bool:
        """Starts the process; False where launchd's helper cannot, which counts as an end with 78."""
        self.due_at, self._started_at = None, now
        self.runs += 1
        descriptors = [one.fileno() for one in self._sockets.values()]
        try:
            with open(self.plist.get("StandardErrorPath", os.devnull), "ab") as output:
                self.process = subprocess.Popen(
                    self.plist["ProgramArguments"],
                    env={**env, **self._variables()},
                    cwd=self.plist.get("WorkingDirectory", "/"),
                    umask=self.plist.get("Umask", 0o022),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=descriptors,
                )
        except OSError:
            self.ended(EX_CONFIG, now)
            return False
        files = self.plist.get("SoftResourceLimits", {}).get("NumberOfFiles", 256)
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (files, 4096))
        return True

    def _variables(self) -> dict[str, str]:
        variables: dict[str, str] = {**self.plist.get("EnvironmentVariables", {}), "XPC_SERVICE_NAME": self.label}
        if self._preload is not None:
            handed = [f"{name}={one.fileno()}" for name, one in self._sockets.items()]
            variables |= {"LD_PRELOAD": str(self._preload)}
            variables |= {"FAKE_LAUNCHD_SOCKETS": handed[0] if handed else ""}
        return variables

    # -- ending -------------------------------------------------------------------------------------------------------

    def ended(self, code: int, now: float) -> None:
        """Takes an exit in, as `Popen.returncode` has it, and decides whether it is to be started again."""
        self.process = None
        self.last_exit = str(code) if code >= 0 else "(never exited)"
        self.last_signal = f"{signal.strsignal(-code)}: {-code}" if code < 0 else None
        short = self._started_at is not None and now - self._started_at < MIN_THROTTLE_S
        self._short_lives = self._short_lives + 1 if short else 0
        if self.removing:
            return
        if self.again or self._keeps_alive(code):
            self.again = False
            self.schedule(now)

    def terminate(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """launchd leaves the files of its sockets."""
        for one in self._sockets.values():
            one.close()
        self._sockets = {}

    def has_visitor(self) -> bool:
        return bool(self._sockets) and bool(select.select(list(self._sockets.values()), [], [], 0)[0])

    def _keeps_alive(self, code: int) -> bool:
        """Of several keys one is enough."""
        rule = self.plist.get("KeepAlive", False)
        if isinstance(rule, bool):
            return rule
        crashed = code < 0 and -code in CRASHES
        met = {"SuccessfulExit": (code == 0), "Crashed": crashed}
        return any(rule[key] == met[key] for key in rule)

    def _throttle_s(self) -> float:
        """From launch to launch: the interval at least, and twice as long for each short life after the first."""
        interval = max(float(self.plist.get("ThrottleInterval", 0)), MIN_THROTTLE_S)
        return float(min(interval * 2 ** max(0, self._short_lives - 1), MAX_THROTTLE_S))

    # -- showing ------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self.process is not None:
            return "running"
        return "spawn scheduled" if self.due_at is not None else "not running"

    def printed(self) -> str:
        arguments = self.plist["ProgramArguments"]
        lines = [
            f"{self.domain}/{self.label} = {{",
            f"\tactive count = {int(self.process is not None)}",
            f"\tpath = {self.path}",
            "\ttype = LaunchAgent",
            f"\tstate = {self.state}",
            "",
            f"\tprogram = {arguments[0]}",
            "\targuments = {",
            *(f"\t\t{argument}" for argument in arguments),
            "\t}",
            "",
            f"\tworking directory = {self.plist.get('WorkingDirectory', '/')}",
            "\tdefault environment = {",
            "\t\tPATH => /usr/bin:/bin:/usr/sbin:/sbin",
            "\t}",
            "",
            "\tenvironment = {",
            *(f"\t\t{name} => {value}" for name, value in self.plist.get("EnvironmentVariables", {}).items()),
            f"\t\tXPC_SERVICE_NAME => {self.label}",
            "\t}",
            "",
            f"\tdomain = {self.domain} [100006]",
            f"\texit timeout = {self.plist.get('ExitTimeOut', 5)}",
            f"\truns = {self.runs}",
            *([f"\tpid = {self.process.pid}"] if self.process is not None else []),
            f"\tlast exit code = {self.last_exit}",
            *([f"\tlast terminating signal = {self.last_signal}"] if self.last_signal else []),
            "",
            "\tendpoints = {",
            *(f'\t\t"{name}" = {{\n\t\t\tpassive = 1\n\t\t}}' for name in self._sockets),
            "\t}",
            f"\tspawn type = {self.plist.get('ProcessType', 'Standard').lower()} (4)",
            "}",
        ]
        return "\n".join(lines) + "\n"


def _listening(entry: Mapping[str, Any]) -> socket.socket:
    """Binds like launchd: what lies at the path is unlinked first."""
    path = entry["SockPathName"]
    if os.path.lexists(path):
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    os.chmod(path, entry.get("SockPathMode", 0o777))
    listening.listen()
    return listening
