"""Where the daemon keeps its files, and where its socket is: the one answer that daemon and CLI share.

Owns the meaning of OMLXD_HOME and OMLXD_SOCKET. Values only, usable from any thread; touches no file. Every `omlxctl`
command imports it, so it costs nothing to import: no dataclasses, no pathlib.
"""

from __future__ import annotations

import os
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


class Paths:
    """Absolute paths of one daemon's home. Relative ones are resolved at once, so a later chdir moves none."""

    __slots__ = ("home", "socket")

    def __init__(self, home: str, socket: str) -> None:
        self.home = os.path.abspath(home)
        self.socket = os.path.abspath(socket)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Paths:
        """Reads OMLXD_HOME (default ~/.omlxd) and OMLXD_SOCKET (default: in the home); an empty one counts as unset."""
        home = _expand(env.get("OMLXD_HOME") or "~/.omlxd", env)
        socket = _expand(env.get("OMLXD_SOCKET") or os.path.join(home, "omlxd.sock"), env)
        return cls(home, socket)

    def check_socket(self) -> None:
        """Raises SocketPathTooLong when the socket's path has too many bytes (not characters) to be bound."""
        num_bytes = len(os.fsencode(self.socket))
        if num_bytes > MAX_SOCKET_BYTES:
            raise SocketPathTooLong(self.socket, num_bytes)

    @property
    def config(self) -> str:
        return os.path.join(self.home, "config.toml")

    @property
    def lock(self) -> str:
        return os.path.join(self.home, "omlxd.lock")

    @property
    def log_dir(self) -> str:
        return os.path.join(self.home, "logs")

    @property
    def log_file(self) -> str:
        return os.path.join(self.log_dir, "omlxd.log")

    @property
    def models_dir(self) -> str:
        return os.path.join(self.home, "models")

    @property
    def cache_dir(self) -> str:
        return os.path.join(self.home, "cache")


def _expand(path: str, env: Mapping[str, str]) -> str:
    """A leading `~/` is the user's home: launchd and editors pass variables without a shell that would expand it."""
    if path != "~" and not path.startswith("~/"):
        return path
    return os.path.join(_user_home(env), path[2:])


def _user_home(env: Mapping[str, str]) -> str:
    home = env.get("HOME")
    if home:
        return home
    import pwd  # only for processes started without HOME

    return pwd.getpwuid(os.getuid()).pw_dir
