"""Where a daemon's socket is: the one answer that daemon, command line and clients share.

Owns the meaning of OMLXD_HOME and OMLXD_SOCKET. Pure functions, usable from any thread; they touch no file. Every
client imports it, so it costs nothing to import.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# sun_path holds 104 bytes on macOS with the closing NUL; editors' clients stop at 102. The same everywhere, so that
# what works on Linux works on a Mac.
MAX_SOCKET_BYTES = 102


class SocketPathTooLong(ValueError):
    """The socket's path does not fit into a socket address."""

    def __init__(self, path: str, num_bytes: int) -> None:
        super().__init__(
            f"the socket path {path} has {num_bytes} bytes, the most is {MAX_SOCKET_BYTES}; "
            "set OMLXD_SOCKET to a shorter path or move OMLXD_HOME"
        )
        self.path = path
        self.num_bytes = num_bytes


def home_path(env: Mapping[str, str]) -> str:
    """OMLXD_HOME, or ~/.omlxd; an empty variable counts as unset. Absolute, so that a later chdir moves nothing."""
    return _absolute(env.get("OMLXD_HOME") or "~/.omlxd", env)


def socket_path(env: Mapping[str, str]) -> str:
    """OMLXD_SOCKET, or omlxd.sock in the home."""
    return _absolute(env.get("OMLXD_SOCKET") or os.path.join(home_path(env), "omlxd.sock"), env)


def _absolute(path: str, env: Mapping[str, str]) -> str:
    """A leading `~/` is the user's home: launchd and editors pass variables without a shell that would expand it."""
    if path == "~" or path.startswith("~/"):
        path = os.path.join(_user_home(env), path[2:])
    return os.path.abspath(path)


def _user_home(env: Mapping[str, str]) -> str:
    home = env.get("HOME")
    if home:
        return home
    import pwd  # only for processes started without HOME

    return pwd.getpwuid(os.getuid()).pw_dir
