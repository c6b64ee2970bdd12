"""The daemon as a service of launchd: finds out how things stand, and takes the steps that a plan is made of.

Owns the property list on disk and nothing between calls. Waits on the calling thread.
"""

from __future__ import annotations

import os
import plistlib

from omlxd.launchd import agent
from omlxd.launchd.launchctl import Launchctl, LaunchctlFailed
from omlxd.launchd.plan import Bootout, Bootstrap, Enable, Kickstart, Remove, Situation, Step, Write


class LaunchdService:
    """The agent in the LaunchAgents of the user whose home is `user_home`."""

    def __init__(self, launchctl: Launchctl, user_home: str) -> None:
        self._launchctl = launchctl
        self.path = agent.agent_path(user_home)

    def situation(self) -> Situation:
        """Raises LaunchctlFailed, OSError."""
        return Situation(self._launchctl.domain(), self._launchctl.loaded(), agent.read(self.path))

    def is_disabled(self, domain: str) -> bool:
        return self._launchctl.is_disabled(domain)

    def take(self, step: Step) -> None:
        """Raises LaunchctlFailed with what may help, OSError where a file cannot be written."""
        match step:
            case Write(path, content):
                write(path, content)
            case Remove(path):
                _remove(path)
            case Enable(domain):
                self._launchctl.enable(domain)
            case Bootout(domain, exit_timeout_s):
                self._launchctl.bootout(domain, exit_timeout_s=exit_timeout_s)
            case Bootstrap(domain, path):
                self._launchctl.bootstrap(domain, path)
            case Kickstart(domain, kill):
                self._launchctl.kickstart(domain, kill=kill)


def write(path: str, content: bytes) -> None:
    """Puts a property list in its place, whole, a real file of mode 0600, after reading it back."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    new = f"{path}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(new, flags, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # also where a crash had left one
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    with open(new, "rb") as file:
        if plistlib.load(file).get("Label") != agent.LABEL:
            raise LaunchctlFailed(f"{new} does not hold what was written", "see that the disk is sound")
    os.replace(new, path)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
