"""A real daemon in a home of its own, for tests from end to end: started as a process, spoken to over its socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omlxd.rpc.client import Client, DaemonUnreachable
from tests.cli.running import Home

DAEMON = (sys.executable, "-P", "-m", "omlxd.daemon")
START_S = 30.0


class Daemon:
    """One home and the daemon process in it."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.home.path.mkdir(mode=0o700, exist_ok=True)
        self.models = self.home.path / "models"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **env: str) -> None:
        """Starts the process and waits until it answers."""
        with open(self.home.path / "stderr", "ab") as stderr:
            self.process = subprocess.Popen(
                DAEMON, env={**self.home.env, **env}, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr
            )
        until(self._answers, within_s=START_S)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.home.path / "stderr").read_text()
        try:
            with self.client() as client:
                return bool(client.call("ping", timeout_s=5) == "pong")
        except DaemonUnreachable:
            return False

    def client(self) -> Client:
        return Client.connect(self.home.socket)

    def call(self, method: str, **params: Any) -> Any:
        with self.client() as client:
            return client.call(method, params, timeout_s=60)

    def live(self) -> int:
        """How many requests have not ended."""
        return int(self.call("daemon.status")["counts"]["live"])

    def signal(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits for the end; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(30)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        return (self.home.path / "logs" / "omlxd.log").read_text()


@contextmanager
def daemon_in_new_home() -> Iterator[Daemon]:
    """Not under pytest's tmp_path: a socket path has 102 bytes at most. Not started yet, so models can be put in."""
    with tempfile.TemporaryDirectory(prefix="omlxd-") as directory:
        daemon = Daemon(Home(Path(directory)))
        try:
            yield daemon
        finally:
            daemon.end()


def until(condition: Callable[[], bool], *, within_s: float = 10.0) -> None:
    """Waits for something that another process brings about."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
