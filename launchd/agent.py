"""The LaunchAgent: what launchd is told about the daemon, as the property list in the user's LaunchAgents.

Values and pure functions; only `read` and `faults` look at the disk. Made by `omlxctl service`, read back by it and by
`omlxctl doctor`. Nothing of the user's shell is taken for granted: paths are absolute, variables are written down.
"""

from __future__ import annotations

import math
import os
import plistlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from xml.parsers.expat import ExpatError

from omlxd.launchd.activation import SOCKET_NAME

LABEL: Final = "dev.omlx.omlxd"
OUTPUT_NAME: Final = "launchd.log"

# Variables that say where models are. Anything secret stays out: `launchctl print` shows these to the user's processes.
CARRIED: Final = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT")

_GUARDED: Final = ("Documents", "Desktop", "Downloads", os.path.join("Library", "Mobile Documents"))
_PATH: Final = "/usr/bin:/bin:/usr/sbin:/sbin"
_MIN_EXIT_TIMEOUT_S: Final = 30  # launchd's own is 5: it would kill a daemon that still drains
_EXIT_MARGIN_S: Final = 15  # over the grace, for closing the models and the last answers
_THROTTLE_S: Final = 10
_FILES: Final = 4096  # an agent gets 256 otherwise, less than the clients that are promised service


def exit_timeout_s(grace_s: float) -> int:
    """How long launchd has to wait between SIGTERM and SIGKILL for a daemon that gives its requests `grace_s`."""
    return max(_MIN_EXIT_TIMEOUT_S, math.ceil(grace_s) + _EXIT_MARGIN_S)


@dataclass(frozen=True, slots=True)
class Agent:
    """One daemon as launchd is to run it. `python` is the virtual environment's own, not what it links to.

    `on_demand`: launchd holds the socket and starts the daemon for its first client, instead of at login.
    """

    python: str
    home: str
    socket: str
    log_dir: str
    grace_s: float
    variables: Mapping[str, str] = field(default_factory=dict)
    on_demand: bool = False

    def definition(self) -> dict[str, Any]:
        """The property list."""
        output = os.path.join(self.log_dir, OUTPUT_NAME)
        return {
            "Label": LABEL,
            # -I: no variable and no directory of the user's decides what is imported. -u: last words are not lost.
            "ProgramArguments": [
                *(self.python, "-I", "-u", "-X", "faulthandler", "-m", "omlxd.daemon"),
                "--supervised=launchd",
            ],
            "ProcessType": "Interactive",  # anything less is throttled, and with it the GPU work: measured 8x slower
            "ExitTimeOut": exit_timeout_s(self.grace_s),
            "ThrottleInterval": _THROTTLE_S,
            "Umask": 0o077,
            "WorkingDirectory": self.home,
            "StandardOutPath": output,
            "StandardErrorPath": output,
            "EnvironmentVariables": {
                "PATH": _PATH,
                "OMLXD_HOME": self.home,
                "OMLXD_SOCKET": self.socket,
                **self.variables,
            },
            # Background too, so that it can be loaded over ssh. Where both load it, the lock lets one run.
            "LimitLoadToSessionType": ["Aqua", "Background"],
            "SoftResourceLimits": {"NumberOfFiles": _FILES},
            **self._start(),
        }

    def encode(self) -> bytes:
        return plistlib.dumps(self.definition())

    def _start(self) -> dict[str, Any]:
        if self.on_demand:
            return {"Sockets": {SOCKET_NAME: {"SockPathName": self.socket, "SockPathMode": 0o600}}}
        # Exit code 0 is a daemon that was asked to stop, or one that starting again would not help.
        return {"RunAtLoad": True, "KeepAlive": {"SuccessfulExit": False}}


@dataclass(frozen=True, slots=True)
class Installed:
    """An agent that was written earlier, as far as it can be read."""

    path: str
    content: bytes
    arguments: Sequence[str]
    environment: Mapping[str, str]
    exit_timeout_s: int
    on_demand: bool

    @property
    def python(self) -> str:
        return self.arguments[0] if self.arguments else ""

    def serves(self, socket: str) -> bool:
        """Whether this agent's daemon is the one at `socket`."""
        return self.environment.get("OMLXD_SOCKET") == socket


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong with the service, and what to do about it. Not grave: it serves all the same, or was stopped."""

    message: str
    advice: str
    is_grave: bool = True


def agents_dir(user_home: str) -> str:
    return os.path.join(user_home, "Library", "LaunchAgents")


def agent_path(user_home: str) -> str:
    """launchd wants a file to be called like the job in it."""
    return os.path.join(agents_dir(user_home), f"{LABEL}.plist")


def is_guarded(path: str, user_home: str) -> bool:
    """Whether macOS asks the user before a job of launchd's may look there; unanswered, the job waits or is refused."""
    places = [os.path.join(user_home, name) for name in _GUARDED]
    return any(path == place or path.startswith(place + os.sep) for place in [*places, "/Volumes"])


def read(path: str) -> Installed | None:
    """The agent at `path`; None where there is none. What cannot be understood of it is left empty, for `faults`."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        return None
    plist = _parsed(content)
    environment = plist.get("EnvironmentVariables", {})
    return Installed(
        path=path,
        content=content,
        arguments=tuple(map(str, plist.get("ProgramArguments", ()))),
        environment={str(name): str(value) for name, value in environment.items()},
        exit_timeout_s=int(plist.get("ExitTimeOut", 5)),
        on_demand="Sockets" in plist,
    )


def faults(installed: Installed, *, python: str, grace_s: float) -> list[Fault]:
    """What keeps launchd from running the agent, or makes it run another daemon than `python`'s, most severe first."""
    again = "run `omlxctl service install` again"
    if _parsed(installed.content).get("Label") != LABEL or not installed.arguments:
        return [Fault(f"{installed.path} is not a property list of {LABEL}", again)]
    found = [*_file_faults(installed.path, again)]
    if not os.access(installed.python, os.X_OK):
        message = f"its Python {installed.python} is gone: the virtual environment was moved or removed"
        found.append(Fault(message, f"{again}, from the one that is to serve"))
    elif installed.python != python:
        message = f"it runs {installed.python}, and this omlxctl belongs to {python}"
        found.append(Fault(message, f"{again} to let this one serve", is_grave=False))
    if installed.exit_timeout_s < exit_timeout_s(grace_s):
        message = f"launchd kills the daemon after {installed.exit_timeout_s} s, and daemon.grace_s is {grace_s:g}"
        found.append(Fault(message, again, is_grave=False))
    output = os.path.dirname(_parsed(installed.content).get("StandardErrorPath", ""))
    if output and not os.path.isdir(output):
        found.append(Fault(f"the directory of its output, {output}, is gone, and launchd starts nothing then", again))
    return found


def _file_faults(path: str, again: str) -> list[Fault]:
    state = os.lstat(path)
    if stat.S_ISLNK(state.st_mode):
        return [Fault(f"{path} is a link, which launchd does not follow at login", f"remove it and {again}")]
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        message = f"{path} belongs to user {state.st_uid} with mode {stat.S_IMODE(state.st_mode):04o}"
        return [Fault(f"{message}; launchd wants it yours, and writable by you alone", again)]
    return []


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        plist = plistlib.loads(content)
    except (plistlib.InvalidFileException, ExpatError, ValueError):
        return {}
    return plist if isinstance(plist, dict) else {}
