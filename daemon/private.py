"""Directories that are the user's alone.

Owns the rule and nothing else. Called by `daemon.main` on the main thread, before the lock is taken.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class UnsafePlace(Exception):
    """A directory or file is not one that a private socket can live in."""


def make_private(directory: str) -> None:
    """Makes `directory` with mode 0700, or checks that it is a real one, this user's and closed to others.

    An empty one, or one with a daemon's files, is closed; any other that is open to others is not ours to change.
    Raises UnsafePlace, or OSError where it cannot be made.
    """
    _make_directories(directory)
    opened = _open(directory)
    try:
        _close_to_others(directory, opened)
    finally:
        os.close(opened)


def _open(directory: str) -> int:
    """What is looked at and what is changed is one directory, whatever its name may stand for meanwhile."""
    try:
        return os.open(directory, _OPEN)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        if os.path.islink(directory):
            raise UnsafePlace(f"{directory} is a link; set OMLXD_HOME to {_target(directory)} itself") from error
        raise UnsafePlace(f"{directory} is not a directory; move it away or set OMLXD_HOME to another place") from error


def _target(link: str) -> str:
    try:
        return os.path.realpath(link)
    except OSError:  # it was a link a moment ago
        return "the directory it leads to"


def _close_to_others(directory: str, opened: int) -> None:
    state = os.fstat(opened)
    if state.st_uid != os.getuid():
        raise UnsafePlace(
            f"{directory} belongs to user {state.st_uid}, not to {os.getuid()}; use a directory of your own"
        )
    if state.st_mode & 0o077:
        if not _is_ours(opened):
            mode = stat.S_IMODE(state.st_mode)
            raise UnsafePlace(f"{directory} is open to others (mode {mode:04o}); run chmod 700 on it, or use another")
        os.fchmod(opened, 0o700)


def _make_directories(path: str) -> None:
    """Every missing one with mode 0700, whatever the umask: os.makedirs would leave the upper ones to it."""
    if os.path.lexists(path):
        return
    _make_directories(os.path.dirname(path))
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return  # a second daemon, started at the same moment


def _is_ours(opened: int) -> bool:
    names = os.listdir(opened)
    return not names or "omlxd.lock" in names or "config.toml" in names
