"""The checks of `omlxctl doctor` on what runs: the service of launchd, the daemon, its models. Main thread only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from omlxd import __version__
from omlxd.cli.context import ANSWER_WITHIN_S, PROTOCOL, Context
from omlxd.cli.errors import CliError, Unreachable
from omlxd.cli.finding import Finding
from omlxd.cli.service_setup import NoLaunchd, launchd_service, user_home
from omlxd.cli.service_status import Health
from omlxd.launchd import agent
from omlxd.launchd.agent import Installed
from omlxd.rpc.client import DaemonUnreachable, NotRunning, RpcError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def service_health(context: Context) -> Health | CliError:
    """How the service stands, or why that cannot be known."""
    try:
        return Health(context, launchd_service(context.env))
    except CliError as error:
        return error


def check_service(context: Context, health: Health | CliError) -> Iterator[Finding]:
    """Nothing where there is no launchd."""
    if isinstance(health, NoLaunchd):
        return
    if isinstance(health, CliError):
        message, _, advice = health.message.partition("; ")
        yield Finding("fail", "service", message, advice or "`omlxctl service status` may say more")
        return
    for fault in health.faults:
        yield Finding("fail" if fault.is_grave else "warn", "service", fault.message, fault.advice)
    if health.now.installed is None:
        yield Finding("ok", "service", "not installed; `omlxctl service install` has the daemon start at login")
    elif not health.faults:
        yield Finding("ok", "service", f"{health.now.installed.path}, {', '.join(health.now.loaded)}")
        yield from _guarded_places(context, health.now.installed)


def _guarded_places(context: Context, installed: Installed) -> Iterator[Finding]:
    """What works in a terminal, which has leave to look there, may fail in the service."""
    variables = installed.environment
    places = [context.paths.home, *context.settings().models.dirs]
    places += [variables[name] for name in ("HF_HOME", "HF_HUB_CACHE") if name in variables]
    for place in places:
        if agent.is_guarded(place, user_home(context.env)):
            message = f"macOS guards {place}: the service may be refused there, or wait for an answer that nobody sees"
            advice = f"move it, or allow {installed.python} in System Settings > Privacy & Security > Files and Folders"
            yield Finding("warn", "service", message, advice)


def check_daemon(context: Context, health: Health | CliError) -> Iterator[Finding]:
    if isinstance(health, Health) and health.waits:
        yield Finding("ok", "daemon", "launchd starts it for its first client")
        return
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
