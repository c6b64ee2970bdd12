"""What a command is given: the console, the paths, and a way to the daemon.

Owns the decision whether a daemon is started for a command. Used by one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from omlxd import __version__
from omlxd.cli.errors import CliError, Unreachable, VersionSkew
from omlxd.daemon.paths import Paths, SocketPathTooLong
from omlxd.rpc.client import Client, NotRunning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from omlxd.cli.console import Console
    from omlxd.daemon.settings import Settings

PROTOCOL = 1
ANSWER_WITHIN_S = 10.0  # for methods that a living daemon answers at once


class Context:
    """One run of `omlxctl`."""

    def __init__(self, console: Console, env: Mapping[str, str], *, socket: str | None, may_start: bool) -> None:
        self.console = console
        self.env = dict(env) if socket is None else {**env, "OMLXD_SOCKET": os.path.abspath(socket)}
        self.paths = Paths.from_env(self.env)
        self._may_start = may_start

    def settings(self) -> Settings:
        """The settings file under the environment. Raises CliError when they cannot be used."""
        from omlxd.daemon import settings

        try:
            return settings.load(self.paths.config, self.env)
        except settings.ConfigError as error:
            raise CliError(str(error), data={"kind": "config", "key": error.key}) from error

    def connect(self, *, on_notification: Callable[[str, Any], None] | None = None) -> Client:
        """A connection to the running daemon. Raises DaemonUnreachable; Unreachable for a path no socket can have."""
        try:
            self.paths.check_socket()
        except SocketPathTooLong as error:
            raise Unreachable(str(error)) from error
        return Client.connect(self.paths.socket, on_notification=on_notification)

    def connect_or_start(self, *, on_notification: Callable[[str, Any], None] | None = None) -> Client:
        """The same, starting a daemon when none answers and --no-start does not forbid it. Raises Unreachable too."""
        try:
            return self.connect(on_notification=on_notification)
        except NotRunning:
            if not self._may_start:
                raise
        from omlxd.cli.service_start import start_service
        from omlxd.cli.start import start_daemon

        if not start_service(self):
            start_daemon(self.paths, self.env, self.console)
        return self.connect(on_notification=on_notification)

    def connect_to_work(self) -> Client:
        """The same, and makes sure that the daemon speaks our protocol. Raises VersionSkew too."""
        client = self.connect_or_start()
        info = client.call("daemon.info")
        if info["protocol"] != PROTOCOL:
            client.close()
            raise VersionSkew(
                f"the daemon (omlxd {info['version']}, pid {info['pid']}) speaks protocol {info['protocol']}, this "
                f"omlxctl {__version__} speaks {PROTOCOL}; stop it with `omlxctl shutdown` and try again",
                data={"kind": VersionSkew.kind, "daemon_protocol": info["protocol"], "protocol": PROTOCOL},
            )
        return client
