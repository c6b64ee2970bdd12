"""One daemon per home."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd.daemon.lock import AlreadyRunning, InstanceLock

HOLD = """
import sys
from omlxd.daemon.lock import InstanceLock
lock = InstanceLock(sys.argv[1], '9.9')
print(flush=True)
input()
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "omlxd.lock")


def test_a_second_lock_says_who_holds_the_first(path: str):
    with InstanceLock(path, "1.2.3"), pytest.raises(AlreadyRunning) as caught:
        InstanceLock(path, "1.2.4")
    assert re.match(
        rf"already running: a daemon \(pid {os.getpid()}, version 1\.2\.3\) holds {path}", str(caught.value)
    )


def test_a_lock_that_was_given_back_can_be_taken_and_its_file_stays(path: str):
    InstanceLock(path, "1").close()
    with InstanceLock(path, "1"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.path.exists(path)


def test_the_lock_of_a_killed_process_is_free_whatever_pid_stands_in_it(path: str):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(AlreadyRunning, match=rf"pid {holder.pid}, version 9\.9"):
        InstanceLock(path, "1")
    holder.kill()
    holder.communicate()
    Path(path).write_text("pid 1, version 1\n")  # a living process, but no holder
    InstanceLock(path, "1").close()


def test_a_holder_that_has_not_signed_yet_is_a_holder(path: str):
    with InstanceLock(path, "1"):
        Path(path).write_text("")
        with pytest.raises(AlreadyRunning, match="just starting"):
            InstanceLock(path, "1")


def test_a_lock_that_is_a_link_is_not_followed(path: str, tmp_path: Path):
    """Whoever could put it there could have us write a pid over any file of the user's."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    os.symlink(precious, path)
    with pytest.raises(OSError, match="symbolic link"):
        InstanceLock(path, "1")
    assert precious.read_text() == "precious"
