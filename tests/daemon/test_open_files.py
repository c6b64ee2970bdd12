"""The limit of open files at the start."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
from omlxd.daemon.open_files import allow_many
allow_many()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


# None above 4096: that is the hard limit which mlx-lm leaves to every later test of a process that imported it.
@pytest.mark.parametrize(
    ("before", "after"), [((256, 4096), "4096 4096"), ((256, 1024), "1024 1024"), ((4096, 4096), "4096 4096")]
)
def test_the_soft_limit_is_raised_and_never_lowered(before: tuple[int, int], after: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *map(str, before)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == after
