"""A daemon process of its own for a measure: its home, its models, its times and what it uses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from omlxd.rpc.client import Client, DaemonUnreachable
from tests.bench.bench_model import CONTEXT, SIZE
from tests.e2e.living import DAEMON, Daemon, daemon_in_new_home
from tests.models import write


@contextmanager
def home_with(*models: str) -> Iterator[Daemon]:
    """A home with a llama of the measures' size under each of these names; its daemon is not started."""
    with daemon_in_new_home() as daemon:
        for seed, name in enumerate(models):
            write("llama", daemon.models / name, seed=seed, context=CONTEXT, **SIZE)
        yield daemon


def spawn(daemon: Daemon) -> tuple[subprocess.Popen[bytes], float]:
    """Starts the daemon; returns its process and after how many seconds a ping was answered."""
    began = time.perf_counter()
    daemon.process = subprocess.Popen(DAEMON, env=daemon.home.env, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while True:
        try:
            with Client.connect(daemon.home.socket) as client:
                client.ping()
            return daemon.process, time.perf_counter() - began
        except DaemonUnreachable:
            time.sleep(0.002)


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def rss_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 1e6


def run_s(*command: str, env: dict[str, str] | None = None) -> float:
    """How long a command of this interpreter takes, from start to exit."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, env=env or os.environ, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
