"""How a command ends when it does not succeed: the exit codes and the errors that carry them.

Values; raised by every module of this room and turned into an exit code, a line and a JSON document by `main`.
"""

from __future__ import annotations

from collections.abc import Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DONE, REFUSED, USAGE, UNREACHABLE, PIPE_CLOSED, INTERRUPTED = 0, 1, 2, 3, 141, 130
CANCELLED_CODE = -32800


class CliError(Exception):
    """A failure as it is shown. The JSON document has `code` and `data`: the daemon's own, else exit code and kind.

    `details` are further lines for people, such as the end of a log.
    """

    exit_code = REFUSED
    kind = "failed"

    def __init__(self, message: str, *, code: int | None = None, data: Any = None, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.code = self.exit_code if code is None else code
        self.data = {"kind": self.kind} if data is None else data
        self.details = details


class UsageError(CliError):
    """The command line, or what was piped in, cannot be used."""

    exit_code = USAGE
    kind = "usage"


class VersionSkew(CliError):
    """The daemon speaks another version of the protocol."""

    kind = "version_skew"


class Unreachable(CliError):
    """No daemon answers."""

    exit_code = UNREACHABLE
    kind = "unreachable"


class Interrupted(CliError):
    """Ctrl-C; the request was cancelled first. `data` has its `partial` result if the daemon sent one."""

    exit_code = INTERRUPTED
    kind = "cancelled"

    def __init__(self, data: Any = None) -> None:
        super().__init__("interrupted", code=CANCELLED_CODE, data=data)


class OutputClosed(Exception):
    """Nobody reads standard output any more. Not a failure worth a word: `head` has what it wanted."""
