"""Where the daemon keeps its files: the one answer that daemon and CLI share.

Values only, usable from any thread; touches no file. Where home and socket are, `rpc.address` says, because clients ask
too. Every `omlxctl` command imports this, so it costs nothing to import: no dataclasses, no pathlib.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from omlxd.rpc.address import MAX_SOCKET_BYTES, SocketPathTooLong, home_path, socket_path

__all__ = ["MAX_SOCKET_BYTES", "Paths", "SocketPathTooLong"]


class Paths:
    """Absolute paths of one daemon's home. Relative ones are resolved at once, so a later chdir moves none."""

    __slots__ = ("home", "socket")

    def __init__(self, home: str, socket: str) -> None:
        self.home = os.path.abspath(home)
        self.socket = os.path.abspath(socket)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Paths:
        """Reads OMLXD_HOME (default ~/.omlxd) and OMLXD_SOCKET (default: in the home); an empty one counts as unset."""
        return cls(home_path(env), socket_path(env))

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
    def cache_place(self) -> str:
        return os.path.join(self.home, "cache-place.json")

    @property
    def cache_dir(self) -> str:
        return os.path.join(self.home, "cache")
