"""The fake libSystem, compiled once per run: a shared library with launch_activate_socket."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_libsystem.c")


def compiled(directory: Path) -> Path:
    """Builds it in `directory`. Skips the test, and says so, where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("NO C COMPILER: launch_activate_socket is not tested; install gcc")
    library = directory / "libfakesystem.so"
    if not library.exists():
        subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, SOURCE], check=True)
    return library
