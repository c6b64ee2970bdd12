"""A user of a Mac: a home, a launchd, an omlxctl that finds the fake launchctl first, and what comes of it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from omlxd.launchd.agent import LABEL
from omlxd.rpc.client import Client, NotRunning
from tests.cli.running import Home, Outcome
from tests.launchd.fake_launchd import FakeLaunchd

LAUNCHCTL = Path(__file__).with_name("launchctl")
LONG = 3600.0  # over every throttle at work here


class Mac:
    """One user's. `pass_time` before a start that launchd would hold back."""

    def __init__(self, directory: Path, *, domains: Sequence[str], libsystem: Path | None) -> None:
        self.directory = directory
        self.home = Home(directory)
        self.agent = directory / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        (directory / "bin").mkdir()
        # Not a link: /usr/bin/env might find a slow python3.
        program = directory / "bin" / "launchctl"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {LAUNCHCTL} "$@"\n')
        program.chmod(0o755)
        self._options = {"libsystem": libsystem}
        self.launchd = FakeLaunchd(directory, directory, domains=domains, libsystem=libsystem)
        self.home.env |= {
            "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
            "FAKE_LAUNCHD": self.launchd.socket,
            "HF_HUB_CACHE": str(directory / "no-models"),
        }

    def run(self, *arguments: str, env: Mapping[str, str] | None = None) -> Outcome:
        return self.home.run(*arguments, env=env)

    def done(self, *arguments: str, env: Mapping[str, str] | None = None) -> Outcome:
        """The same, and it must succeed."""
        outcome = self.run(*arguments, env=env)
        assert outcome.code == 0, outcome
        return outcome

    @property
    def pid(self) -> int | None:
        """The process of the service in the session at the screen."""
        job = self.launchd.job(LABEL)
        return None if job is None or job.process is None else job.process.pid

    def daemon_pid(self) -> int | None:
        """The process that answers at the socket."""
        try:
            with Client.connect(self.home.socket) as client:
                return int(client.call("daemon.info", timeout_s=30)["pid"])
        except NotRunning:
            return None

    def wait_answers(self) -> int:
        """Waits for a daemon that nobody is asked for; returns its pid."""
        self.launchd.wait_for(lambda: self.daemon_pid() is not None)
        pid = self.daemon_pid()
        assert pid is not None
        return pid

    def crash(self) -> None:
        """The service's process gets the signal of a crash, and is gone when this returns."""
        pid = self.pid
        assert pid is not None
        os.kill(pid, signal.SIGABRT)
        self.launchd.wait_for(lambda: self.pid != pid)

    def log(self, name: str = "omlxd.log") -> str:
        return (self.home.path / "logs" / name).read_text()

    def reboot(self) -> None:
        """What is in files stays; somebody has to log in."""
        self.launchd.close()
        self.launchd = FakeLaunchd(self.directory, self.directory, domains=(), **self._options)


@contextmanager
def mac(*, domains: Sequence[str] = ("gui", "user"), libsystem: Path | None = None) -> Iterator[Mac]:
    directory = Path(tempfile.mkdtemp(prefix="mac."))
    living = Mac(directory, domains=domains, libsystem=libsystem)
    try:
        yield living
    finally:
        living.launchd.close()
        shutil.rmtree(directory)
