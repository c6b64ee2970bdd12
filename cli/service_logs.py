"""`omlxctl service logs`: the daemon's log, across its rotation. Needs no daemon and no launchd. Main thread only."""

from __future__ import annotations

import os
import time

from omlxd.cli.context import Context
from omlxd.cli.errors import DONE, CliError, UsageError
from omlxd.cli.follow import Follower

_POLL_S = 0.2


def logs(context: Context, *, lines: int, follow: bool) -> int:
    """Prints the last lines; with `follow` it goes on until Ctrl-C or until its reader leaves."""
    path, console = context.paths.log_file, context.console
    if follow and console.json:
        raise UsageError("service logs --follow has no end, and --json is one document; leave one of them out")
    if not follow and not os.path.exists(path):
        raise CliError(f"there is no log at {path} yet; the daemon makes it when it starts")
    try:
        with Follower(path) as follower:
            tail = follower.tail(lines)
            if console.json:
                console.document({"path": path, "lines": list(tail)})
                return DONE
            console.write("".join(f"{line}\n" for line in tail))
            while follow:
                console.write(follower.more())
                time.sleep(_POLL_S)
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from error
    return DONE
