"""What the clients raise, and how the kernel's refusals become that.

Values, usable from any thread; imports next to nothing, because every `omlxctl` command pays for it.
"""

from __future__ import annotations

import errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CANCELLED = -32800


class ClientError(Exception):
    """The root of everything that the clients raise."""


class DaemonUnreachable(ClientError):
    """No daemon answers at this path: none is there, it is gone, it is silent, or it is not a daemon."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"no daemon answers at {path}: {reason}")
        self.path = path
        self.reason = reason


class NotRunning(DaemonUnreachable):
    """Nothing listens at the path, so a daemon could be started there."""


class ConnectionLost(DaemonUnreachable):
    """A daemon did answer, and then the connection ended under a running request. It may have been carried out."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.args = (f"lost the daemon at {path}: {reason}",)


class ClientClosed(ClientError):
    """The client was closed here, before or while it was used."""

    def __init__(self) -> None:
        super().__init__("this client is closed; connect() opens another")


class RpcError(ClientError):
    """The daemon's answer is an error. `data` has at least `kind` for the daemon's own codes."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    @property
    def kind(self) -> str | None:
        """The stable name of the failure, such as `model_not_found`: what programs should look at."""
        return self.data.get("kind") if isinstance(self.data, dict) else None

    @property
    def partial(self) -> Any:
        """What a cancelled generation had made by then; None for every other error."""
        return self.data.get("partial") if self.code == CANCELLED and isinstance(self.data, dict) else None


def lost(path: str, error: OSError) -> ConnectionLost:
    return ConnectionLost(path, f"the connection broke ({error.strerror or error})")


def unreachable(path: str, error: OSError) -> DaemonUnreachable:
    """Why connecting to `path` failed."""
    if error.errno == errno.ENOENT:
        return NotRunning(path, "there is no socket")
    if error.errno == errno.ECONNREFUSED:
        return NotRunning(path, "nobody listens on that socket")
    if error.errno == errno.EAGAIN:
        return DaemonUnreachable(path, "it has more connections waiting than it takes")
    return DaemonUnreachable(path, error.strerror or str(error))  # "AF_UNIX path too long" has no errno
