"""`omlxctl service`: the daemon as a service of macOS's launchd. `logs` alone works anywhere. Main thread only."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from omlxd.cli.context import Context
from omlxd.cli.errors import DONE, UsageError
from omlxd.cli.parser import Parser

_ACTIONS = ("install", "uninstall", "start", "stop", "restart", "status", "logs")
_FLAGS = {
    "on_demand": ("install",),
    "dry_run": ("install", "uninstall", "start", "stop", "restart"),
    "follow": ("logs",),
    "lines": ("logs",),
}
_LINES = 50


class Service:
    """Installs it, starts and stops it, shows how it stands, and prints its log."""

    def arguments(self, parser: Parser) -> None:
        parser.usage = (
            "omlxctl service install [--on-demand] | uninstall | start | stop | restart | status | logs [-f] [options]"
        )
        parser.add_argument("action", choices=list(_ACTIONS), help="what to do with the service")
        parser.add_argument(
            "--on-demand", action="store_true", help="install: start at the first call and not at login"
        )
        parser.add_argument("--dry-run", action="store_true", help="print the property list and commands, do nothing")
        parser.add_argument("-f", "--follow", action="store_true", help="logs: go on with what is written from now on")
        parser.add_argument("-n", "--lines", type=int, metavar="N", help=f"logs: the last N lines (default {_LINES})")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        for flag, actions in _FLAGS.items():
            if getattr(given, flag) not in (None, False) and given.action not in actions:
                raise UsageError(f"--{flag.replace('_', '-')} goes with service {', '.join(actions)}")
        if given.action == "logs":
            from omlxd.cli.service_logs import logs

            lines = _LINES if given.lines is None else max(0, given.lines)
            return logs(context, lines=lines, follow=given.follow)
        if given.action == "status":
            from omlxd.cli.service_status import status

            return status(context)
        return _change(context, given)


def _change(context: Context, given: argparse.Namespace) -> int:
    from omlxd.cli import service_actions as actions

    if given.action == "install":
        return actions.install(context, on_demand=given.on_demand, dry_run=given.dry_run)
    act: Callable[..., int] = {
        "uninstall": actions.uninstall,
        "start": actions.start,
        "stop": actions.stop,
        "restart": actions.restart,
    }[given.action]
    act(context, dry_run=given.dry_run)
    return DONE
