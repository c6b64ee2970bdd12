"""`omlxd` as a process in a home of the test's own, with a clean environment."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omlxd.rpc.client import Client

OMLXD = [sys.executable, "-m", "omlxd.daemon"]


def environment(home: Path, **variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
    return {**clean, "OMLXD_HOME": str(home), "HF_HOME": str(home / "hf"), **variables}


def refused(home: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Runs one that does not start; gives its code and what it says."""
    env = environment(home, **variables)
    done = subprocess.run([*OMLXD, *arguments], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    return done.returncode, done.stderr


@contextmanager
def started(home: Path, *arguments: str, umask: int = 0o022, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """One that runs; its stderr is read until it says that it is ready."""
    env = environment(home, **variables)
    daemon = subprocess.Popen([*OMLXD, *arguments], env=env, stderr=subprocess.PIPE, text=True, umask=umask)
    try:
        assert daemon.stderr is not None
        for line in daemon.stderr:
            if "ready at" in line:
                break
        yield daemon
    finally:
        daemon.kill()
        daemon.communicate()


def stopped(daemon: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> int:
    daemon.send_signal(number)
    return daemon.wait(30)


def ping(home: Path) -> object:
    with Client.connect(str(home / "omlxd.sock")) as client:
        return client.call("ping")
