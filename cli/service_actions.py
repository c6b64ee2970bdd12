"""`omlxctl service install|uninstall|start|stop|restart`: a plan, shown or carried out, and proof that it worked.

Each may be given any number of times. Main thread only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from omlxd.cli.context import Context
from omlxd.cli.errors import DONE, CliError
from omlxd.cli.service_setup import launchd_service, wanted_agent
from omlxd.cli.service_wait import Watch, end_daemon
from omlxd.launchd import plan
from omlxd.launchd.agent import LABEL, exit_timeout_s
from omlxd.launchd.launchctl import LaunchctlFailed
from omlxd.launchd.plan import Bootout, Bootstrap, Kickstart, Situation, Step, Write
from omlxd.launchd.service import LaunchdService


def install(context: Context, *, on_demand: bool, dry_run: bool) -> int:
    """Writes the agent and loads it; a daemon that runs already ends first, after its requests."""
    service = launchd_service(context.env)
    context.paths.check_socket()
    grace_s = context.settings().daemon.grace_s
    agent = wanted_agent(context.paths, context.env, grace_s=grace_s, on_demand=on_demand)
    now = situation(service)
    steps = plan.install(now, service.path, agent.encode(), exit_timeout_s=exit_timeout_s(grace_s))
    if dry_run:
        return _show(context, steps)
    _carry_out(context, service, now, steps, grace_s=grace_s)
    done = "is installed" if any(isinstance(step, Write) for step in steps) else "was installed already"
    _tell(context, service, f"{done}; it starts {'at the first call' if on_demand else 'at login'} and runs now", steps)
    return DONE


def uninstall(context: Context, *, dry_run: bool) -> int:
    service = launchd_service(context.env)
    steps = plan.uninstall(situation(service))
    if dry_run:
        return _show(context, steps)
    take_all(service, steps)
    _tell(context, service, "is uninstalled; the home and its models stay" if steps else "is not installed", steps)
    return DONE


def start(context: Context, *, dry_run: bool) -> int:
    service = launchd_service(context.env)
    now = _installed(service)
    steps = plan.start(now)
    if dry_run:
        return _show(context, steps)
    _carry_out(context, service, now, steps, grace_s=context.settings().daemon.grace_s)
    _tell(context, service, "runs" if steps else "runs already", steps)
    return DONE


def stop(context: Context, *, dry_run: bool) -> int:
    """Until the next login, or `start`."""
    service = launchd_service(context.env)
    steps = plan.stop(situation(service))
    if dry_run:
        return _show(context, steps)
    take_all(service, steps)
    _tell(context, service, "is stopped; it comes back at the next login" if steps else "does not run", steps)
    return DONE


def restart(context: Context, *, dry_run: bool) -> int:
    service = launchd_service(context.env)
    now = _installed(service)
    steps = plan.restart(now)
    if dry_run:
        return _show(context, steps)
    _carry_out(context, service, now, steps, grace_s=context.settings().daemon.grace_s)
    _tell(context, service, "runs anew", steps)
    return DONE


def situation(service: LaunchdService) -> Situation:
    """Raises CliError where launchd or the file cannot be read."""
    try:
        return service.situation()
    except LaunchctlFailed as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"cannot read {service.path}: {error.strerror}") from error


def take_all(service: LaunchdService, steps: Sequence[Step]) -> None:
    """Raises CliError at the first that fails."""
    for step in steps:
        try:
            service.take(step)
        except LaunchctlFailed as error:
            raise CliError(str(error)) from error
        except OSError as error:
            raise CliError(f"cannot do `{plan.described(step, LABEL).splitlines()[0]}`: {error}") from error


def _installed(service: LaunchdService) -> Situation:
    now = situation(service)
    if now.installed is None:
        raise CliError("the service is not installed; `omlxctl service install` does it")
    return now


def _carry_out(
    context: Context, service: LaunchdService, now: Situation, steps: Sequence[Step], *, grace_s: float
) -> None:
    """Takes the steps, and waits for the new daemon to answer.

    A daemon of no service is ended between: after the service's own has gone, so that it is not taken for one.
    """
    _make_directories(context)
    ends = [step for step in steps if isinstance(step, Bootout)]
    take_all(service, ends)
    begins = [step for step in steps if not isinstance(step, Bootout)]
    if any(isinstance(step, Bootstrap) or (isinstance(step, Kickstart) and not step.kill) for step in begins):
        pid = end_daemon(context, grace_s=grace_s)
        if pid is not None:
            context.console.note(f"ended the daemon that ran already (pid {pid})")
    watch = Watch(context, service, now)
    take_all(service, begins)
    watch.wait_answers()


def _make_directories(context: Context) -> None:
    """launchd starts nothing whose working directory or output it cannot open."""
    try:
        os.makedirs(context.paths.home, mode=0o700, exist_ok=True)
        os.makedirs(context.paths.log_dir, mode=0o700, exist_ok=True)
    except OSError as error:
        raise CliError(f"cannot make {error.filename}: {error.strerror}") from error


def _show(context: Context, steps: Sequence[Step]) -> int:
    lines = [plan.described(step, LABEL) for step in steps]
    if context.console.json:
        context.console.document({"steps": lines})
    elif lines:
        context.console.line("\n".join(lines))
    else:
        context.console.note("nothing to do")
    return DONE


def _tell(context: Context, service: LaunchdService, what: str, steps: Sequence[Step]) -> None:
    if context.console.json:
        now = situation(service)
        context.console.document(
            {
                "changed": bool(steps),
                "installed": now.installed is not None,
                "loaded": list(now.loaded),
                "pid": now.printed.pid,
            }
        )
    else:
        context.console.note(f"the service {LABEL} {what}")
