"""C that a test needs to stand in for the system, compiled when it is needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def library(source: Path, directory: Path) -> Path:
    """The shared library of `source`. Skips the test, and says so, where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip(f"NO C COMPILER: what needs {source.name} is not tested; install gcc")
    built = directory / f"{source.stem}.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", built, source, "-ldl"], check=True)
    return built
