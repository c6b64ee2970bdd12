"""Where a run took place: the machine, the commit and the versions, and the BLAS that measures are started with.

Reads only; imports no mlx. On Linux mlx brings a reference BLAS that is some fifteen times slower than the machine, so
measures run with OpenBLAS where it is installed (PLATFORM.md 2.4): one prefill turn then costs what it would on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OPENBLAS = Path("/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3")
PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "anyio", "msgspec", "jsonrpcserver")


def environment() -> dict[str, str]:
    """What measures run under: OpenBLAS on one thread, so that the other core is the daemon's loop and the clients'."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
    if not has_openblas():
        return kept
    return {**kept, "LD_PRELOAD": str(OPENBLAS), "OPENBLAS_NUM_THREADS": "1"}


def has_openblas() -> bool:
    return sys.platform == "linux" and OPENBLAS.exists()


def describe() -> Mapping[str, Any]:
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "openblas": has_openblas(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def commit() -> str:
    """The commit that was measured, marked where the tree held more than it."""
    head = _git("rev-parse", "HEAD")
    return f"{head}+changes" if _git("status", "--porcelain", "--untracked-files=no") else head


def at_commit(commit: str, path: str) -> str:
    """A file's text as a commit has it. Raises subprocess.CalledProcessError where it has none."""
    return _git("show", f"{commit}:{path}")


def _git(*arguments: str) -> str:
    root = Path(__file__).parents[2]
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()
