"""The home: the user's alone, and whatever its name stands for meanwhile, nobody else's directory is touched."""

import ctypes
import os
import re
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlxd.daemon.private import UnsafePlace, make_private

LIBC = ctypes.CDLL(None)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.usefixtures("open_umask")
def test_every_directory_that_is_made_is_private(tmp_path: Path):
    make_private(str(tmp_path / "a" / "b"))
    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o700, 0o700)


def test_an_empty_or_used_home_is_closed_to_others(tmp_path: Path):
    for names in ([], ["omlxd.lock", "logs"], ["config.toml", "models", "x"]):
        home = tmp_path / f"home{len(names)}"
        home.mkdir(mode=0o755)
        for name in names:
            (home / name).touch()
        make_private(str(home))
        assert mode(home) == 0o700


def test_a_directory_with_other_things_in_it_is_not_changed(tmp_path: Path):
    (tmp_path / "project").mkdir(mode=0o755)
    (tmp_path / "project" / "file").touch()
    with pytest.raises(UnsafePlace, match=r"is open to others \(mode 0755\); run chmod 700 on it, or use another"):
        make_private(str(tmp_path / "project"))
    assert mode(tmp_path / "project") == 0o755


def test_a_link_a_file_and_a_strangers_directory_are_refused(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    with pytest.raises(UnsafePlace, match=re.escape(f"set OMLXD_HOME to {tmp_path}/real itself")):
        make_private(str(tmp_path / "link"))
    with pytest.raises(UnsafePlace, match="is not a directory"):
        make_private(str(tmp_path / "file"))
    if os.getuid() != 0:
        with pytest.raises(UnsafePlace, match="belongs to user 0"):
            make_private("/")


@pytest.mark.skipif(sys.platform != "linux", reason="needs renameat2, which swaps two names at once")
def test_a_home_that_turns_into_a_link_never_changes_what_it_leads_to(tmp_path: Path):
    """Somebody who may write beside the home swaps it for a link to another of the user's directories, and back."""
    home, link, other = (str(tmp_path / name) for name in ("home", "link", "other"))
    for place in (home, other):
        os.mkdir(place, 0o755)
        Path(place, "omlxd.lock").touch()
    os.symlink(other, link)
    real = os.open(home, os.O_RDONLY)
    ended = threading.Event()

    def swap() -> None:
        exchange, cwd = 2, -100  # RENAME_EXCHANGE, AT_FDCWD
        names = (cwd, os.fsencode(home), cwd, os.fsencode(link), exchange)
        while not ended.is_set():
            assert LIBC.renameat2(*names) == 0

    swapper = threading.Thread(target=swap)
    swapper.start()
    refused = 0
    try:
        for _ in range(3000):
            os.fchmod(real, 0o755)
            try:
                make_private(home)
            except UnsafePlace:
                refused += 1
    finally:
        ended.set()
        swapper.join()
        os.close(real)
    assert 0 < refused < 3000
    assert mode(other) == 0o755
