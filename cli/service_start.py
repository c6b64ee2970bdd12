"""Starting the daemon as the service that was installed, for a command that needs one. Main thread only."""

from __future__ import annotations

from omlxd.cli.context import Context
from omlxd.cli.errors import CliError, Unreachable
from omlxd.cli.service_actions import situation, take_all
from omlxd.cli.service_setup import NoLaunchd, launchd_service, user_home
from omlxd.cli.service_wait import Watch
from omlxd.launchd import agent, plan


def start_service(context: Context) -> bool:
    """Starts it and returns when it answers; False where no service is installed for this socket.

    Raises Unreachable, with the reason: a service that does not start is not replaced by a daemon that is none.
    """
    installed = agent.read(agent.agent_path(user_home(context.env)))
    if installed is None or not installed.serves(context.paths.socket):
        return False
    try:
        service = launchd_service(context.env)
    except NoLaunchd:
        return False
    context.console.note(f"starting the service {agent.LABEL}")
    try:
        now = situation(service)
        watch = Watch(context, service, now)
        take_all(service, plan.start(now))
        watch.wait_answers()
    except CliError as error:
        message = f"{error.message}; `omlxctl service status` shows how it stands"
        raise Unreachable(message, details=error.details) from error
    return True
