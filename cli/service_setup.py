"""The launchd service of this user and this home, for the commands that look at it or change it.

Owns the decision whether there can be one: that takes launchctl, and the user's own session. Main thread only.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from omlxd.cli.errors import CliError
from omlxd.daemon.paths import Paths
from omlxd.launchd import agent
from omlxd.launchd.agent import Agent
from omlxd.launchd.launchctl import Launchctl, Program
from omlxd.launchd.service import LaunchdService


class NoLaunchd(CliError):
    """There is nothing here that could run a service."""

    kind = "no_launchd"


def launchd_service(env: Mapping[str, str]) -> LaunchdService:
    """Raises NoLaunchd where there is no launchctl, CliError under sudo."""
    program = shutil.which("launchctl", path=env.get("PATH", os.defpath))
    if program is None:
        raise NoLaunchd(
            "this system has no launchctl, which runs services on macOS; `omlxd` runs the daemon in the foreground, "
            "and docs/service.md has units for systemd"
        )
    if os.geteuid() == 0 and env.get("SUDO_UID", "0") != "0":
        raise CliError("the service is a user's own; run this without sudo, as the user whom it is to serve")
    launchctl = Launchctl(Program(program, env), label=agent.LABEL, uid=os.getuid())
    return LaunchdService(launchctl, user_home(env))


def wanted_agent(paths: Paths, env: Mapping[str, str], *, grace_s: float, on_demand: bool) -> Agent:
    """The agent for this home, run by the Python that runs this."""
    return Agent(
        python=sys.executable,  # as the environment calls it: what it links to changes with the next upgrade
        home=paths.home,
        socket=paths.socket,
        log_dir=paths.log_dir,
        grace_s=grace_s,
        variables={name: env[name] for name in agent.CARRIED if env.get(name)},
        on_demand=on_demand,
    )


def user_home(env: Mapping[str, str]) -> str:
    return env.get("HOME") or os.path.expanduser("~")
