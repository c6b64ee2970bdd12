"""Waiting for the service to answer, and saying why it does not; and waiting for a daemon that is no service to go.

The socket is the judge: launchd says that it has started a process, not that the process serves. Main thread only.
"""

from __future__ import annotations

import fcntl
import os
import time

from omlxd.cli.context import ANSWER_WITHIN_S, Context
from omlxd.cli.errors import CliError
from omlxd.cli.start import lines_after, size_of
from omlxd.launchd.agent import OUTPUT_NAME
from omlxd.launchd.exit_codes import LOGIN_ITEMS, NOT_STARTED, meaning_of_end
from omlxd.launchd.plan import Situation
from omlxd.launchd.printed import HELD_BACK, STOPPED
from omlxd.launchd.service import LaunchdService
from omlxd.rpc.client import DaemonUnreachable, RpcError

_ANSWERS_S = 15.0  # launchd's throttle, which nothing shortens, and a start
_END_MARGIN_S = 10.0
_POLL_S = 0.05
_ASK_LAUNCHD_EVERY = 10


class Watch:
    """Made before the service is started, so that what it says and how often it ran can be told from earlier."""

    def __init__(self, context: Context, service: LaunchdService, before: Situation) -> None:
        self._context = context
        self._service = service
        self._runs = {domain: printed.runs or 0 for domain, printed in before.loaded.items()}
        paths = context.paths
        self._logs = {path: size_of(path) for path in (os.path.join(paths.log_dir, OUTPUT_NAME), paths.log_file)}

    def wait_answers(self) -> None:
        """Returns when the daemon answers. Raises CliError, with the reason as far as it is known, if it does not."""
        deadline = time.monotonic() + _ANSWERS_S
        polls = 0
        while time.monotonic() < deadline:
            if self._answers():
                return
            polls += 1
            if polls % _ASK_LAUNCHD_EVERY == 0 and self._has_ended(self._service.situation()):
                break
            time.sleep(_POLL_S)
        raise self._failure(self._service.situation())

    def _answers(self) -> bool:
        try:
            with self._context.connect() as client:
                client.call("ping", timeout_s=ANSWER_WITHIN_S)
        except RpcError as error:
            raise CliError(error.message, code=error.code, data=error.data) from error
        except DaemonUnreachable:
            return False
        return True

    def _has_ended(self, now: Situation) -> bool:
        """It ran, and waiting is of no use: launchd will not start it again, or could not start it at all."""
        return any(
            (printed.state == STOPPED or printed.last_exit_code == NOT_STARTED)
            and printed.pid is None
            and (printed.runs or 0) > self._runs.get(domain, 0)
            for domain, printed in now.loaded.items()
        )

    def _failure(self, now: Situation) -> CliError:
        details = [line for path, size in self._logs.items() for line in lines_after(path, size)]
        if not now.loaded:
            return CliError(
                "launchd has taken the service and does not list it: macOS may be blocking it; see that omlxd is "
                f"allowed in {LOGIN_ITEMS}",
                details=details,
            )
        printed = now.printed
        end = None if printed.last_exit_code is None else meaning_of_end(printed.last_exit_code)
        why = f"launchd says: {printed.state or 'loaded'}"
        if printed.state == HELD_BACK:
            why += ", which is how it holds back what ended soon after its start; it goes on by itself"
        if printed.last_signal is not None:
            why += f", last ended by {printed.last_signal}"
        elif end is not None:
            why += f"; {end.what}; {end.advice}"
        return CliError(f"the service is loaded and no daemon answers; {why}", details=details)


def end_daemon(context: Context, *, grace_s: float) -> int | None:
    """Ends the daemon that has this home and is no service, and returns its pid; None where there is none.

    Two daemons cannot share a home: the service's would give way. Raises CliError when it does not end.
    """
    try:
        with context.connect() as client:
            pid: int = client.call("daemon.info", timeout_s=ANSWER_WITHIN_S)["pid"]
            client.call("daemon.shutdown", timeout_s=ANSWER_WITHIN_S)
    except DaemonUnreachable:
        return None
    deadline = time.monotonic() + grace_s + _END_MARGIN_S
    while _is_locked(context.paths.lock):
        if time.monotonic() > deadline:
            raise CliError(f"the daemon that runs already, pid {pid}, does not end; kill it and try again")
        time.sleep(_POLL_S)
    return pid


def _is_locked(path: str) -> bool:
    """Tries a lock that is free the moment it is had; nobody else starts a daemon meanwhile."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
