"""`omlxctl service status`: what launchd has, what runs, whether it answers, and what is wrong. Starts nothing."""

from __future__ import annotations

import sys

from omlxd import __version__
from omlxd.cli.context import ANSWER_WITHIN_S, Context
from omlxd.cli.errors import DONE, REFUSED, CliError
from omlxd.cli.service_actions import situation
from omlxd.cli.service_setup import launchd_service
from omlxd.launchd import agent
from omlxd.launchd.agent import Fault
from omlxd.launchd.exit_codes import LOGIN_ITEMS, meaning_of_end
from omlxd.launchd.plan import Situation
from omlxd.launchd.printed import Printed
from omlxd.launchd.service import LaunchdService
from omlxd.rpc.client import DaemonUnreachable, RpcError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Health:
    """The service as it stands: `daemon` is the answer of `daemon.info`, None where nobody was asked or answers."""

    def __init__(self, context: Context, service: LaunchdService) -> None:
        self.now: Situation = situation(service)
        self.disabled = service.is_disabled(self.now.domain)
        self.printed = self.now.printed
        self.daemon = None if self.waits else _daemon(context)
        self.faults = [] if self.now.installed is None else list(self._faults(context))

    @property
    def waits(self) -> bool:
        """Whether launchd holds the socket for the first client; asking there would start the daemon."""
        installed = self.now.installed
        return installed is not None and installed.on_demand and bool(self.now.loaded) and self.printed.pid is None

    def _faults(self, context: Context) -> list[Fault]:
        installed = self.now.installed
        assert installed is not None
        try:
            grace_s = context.settings().daemon.grace_s
        except CliError as error:
            return [Fault(error.message, "mend the settings: the service does not start with them")]
        found = agent.faults(installed, python=sys.executable, grace_s=grace_s)
        if not installed.serves(context.paths.socket):
            theirs = installed.environment.get("OMLXD_HOME")
            message = f"it serves the home {theirs}, not {context.paths.home}"
            return [*found, Fault(message, "set OMLXD_HOME to that one", is_grave=False)]
        return [*found, *self._faults_of_launchd(), *self._faults_of_daemon()]

    def _faults_of_launchd(self) -> list[Fault]:
        if self.disabled:
            return [Fault("it is switched off", f"switch it on in {LOGIN_ITEMS}, then `omlxctl service start`")]
        if not self.now.loaded:
            advice = f"`omlxctl service start`; if it stays so after a login, see {LOGIN_ITEMS}: macOS may block it"
            return [Fault("it is not loaded", advice, is_grave=False)]
        found = []
        if self.printed.arguments and not self.now.is_as_written(self.printed):
            message = "what launchd has loaded is not what the file says"
            found.append(Fault(message, "`omlxctl service restart`", is_grave=False))
        if self.printed.pid is None and not self.waits:
            found.append(_end(self.printed))
        return found

    def _faults_of_daemon(self) -> list[Fault]:
        daemon, pid = self.daemon, self.printed.pid
        if daemon is None:
            silent = pid is not None
            return [Fault(f"its daemon, pid {pid}, does not answer", "`omlxctl service restart`")] if silent else []
        found = []
        if pid != daemon["pid"]:
            message = f"another daemon serves the home: pid {daemon['pid']}, which launchd did not start"
            found.append(Fault(message, "`omlxctl service start` ends it and starts the service"))
        if daemon["version"] != __version__:
            message = f"omlxd {daemon['version']} runs, and {__version__} is installed"
            found.append(Fault(message, "`omlxctl service restart`", is_grave=False))
        return found


def status(context: Context) -> int:
    """Exit code 0 for a service that is in order, 1 for one that is not, or none."""
    health = Health(context, launchd_service(context.env))
    console = context.console
    if console.json:
        console.document(_document(context, health))
    else:
        for name, value in _facts(context, health):
            console.line(f"{name:<8}  {value}")
        for fault in health.faults:
            console.line(f"wrong     {fault.message}\n          {fault.advice}")
    return DONE if health.now.installed is not None and not health.faults else REFUSED


def _daemon(context: Context) -> dict[str, Any] | None:
    try:
        with context.connect() as client:
            info: dict[str, Any] = client.call("daemon.info", timeout_s=ANSWER_WITHIN_S)
            return info
    except (DaemonUnreachable, RpcError):
        return None


def _end(printed: Printed) -> Fault:
    state = f"it does not run (launchd: {printed.state or 'unknown'}, {printed.runs or 0} starts"
    if printed.last_signal is not None:
        return Fault(f"{state}, last ended by {printed.last_signal})", "`omlxctl service logs` may show why")
    end = None if printed.last_exit_code is None else meaning_of_end(printed.last_exit_code)
    if end is None:
        return Fault(f"{state})", "`omlxctl service start`", is_grave=False)
    return Fault(f"{state}): {end.what}", end.advice)


def _document(context: Context, health: Health) -> dict[str, Any]:
    now, printed = health.now, health.printed
    return {
        "label": agent.LABEL,
        "installed": None if now.installed is None else now.installed.path,
        "on_demand": now.installed is not None and now.installed.on_demand,
        "disabled": health.disabled,
        "loaded": list(now.loaded),
        "state": printed.state,
        "pid": printed.pid,
        "runs": printed.runs,
        "last_exit_code": printed.last_exit_code,
        "last_signal": printed.last_signal,
        "socket": context.paths.socket,
        "answers": None if health.waits else health.daemon is not None,
        "daemon_version": None if health.daemon is None else health.daemon["version"],
        "client_version": __version__,
        "faults": [
            {"message": fault.message, "advice": fault.advice, "grave": fault.is_grave} for fault in health.faults
        ],
    }


def _facts(context: Context, health: Health) -> list[tuple[str, str]]:
    now, printed = health.now, health.printed
    if now.installed is None:
        return [("service", f"{agent.LABEL} is not installed; `omlxctl service install` does it")]
    answers = "is answered" if health.daemon is not None else "is not answered"
    facts = [
        ("service", f"{agent.LABEL}, {'on demand' if now.installed.on_demand else 'from login on'}"),
        ("file", now.installed.path),
        ("python", now.installed.python),
        ("loaded", ", ".join(now.loaded) or "no"),
        ("socket", f"{context.paths.socket} {'waits for its first client' if health.waits else answers}"),
    ]
    if now.loaded:
        last = printed.last_signal or printed.last_exit or "unknown"
        pid = "" if printed.pid is None else f", pid {printed.pid}"
        facts.insert(4, ("launchd", f"{printed.state or 'unknown'}{pid}, {printed.runs or 0} starts, last exit {last}"))
    if health.daemon is not None:
        facts.append(("daemon", f"omlxd {health.daemon['version']}, pid {health.daemon['pid']}"))
    return facts
