"""A hard limit of open files below what mlx-lm sets is an error that says so, not a ValueError in an import."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, resource, sys
from omlxd.engine.api import ModelLoadFailed
from omlxd.engine.open_files import allow_mlx_lm
resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))
if os.getuid() == 0:
    os.setuid(65534)  # who may not raise it again
try:
    allow_mlx_lm("m")
except ModelLoadFailed as failed:
    print(failed)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def said(hard: int) -> list[str]:
    done = subprocess.run([sys.executable, "-c", CODE, str(hard)], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_limit_that_is_too_low_and_cannot_be_raised_is_named_with_what_to_do() -> None:
    error, limits = said(1024)
    assert "cannot load 'm'" in error
    assert "to 4096, here it is 1024" in error
    assert "ulimit -Hn 4096" in error
    assert limits == "256 1024"


def test_a_limit_that_is_high_enough_stays_as_it_is() -> None:
    assert said(4096) == ["256 4096"]
