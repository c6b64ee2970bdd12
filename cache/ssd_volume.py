"""The directory of the SSD tier while it is open: its owner's lock, its index, and where each file belongs.

Opened, used and closed by the writer thread; paths are values for everybody. One process owns a directory, by an flock
that ends with it; a second one may only read. A drive that is not there is waited for, never replaced: at most the
directory itself is made, and not where another disk shows through the empty mount point.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omlxd.cache.disk import PRIVATE_FILE, Disk
from omlxd.cache.errors import CacheError
from omlxd.cache.ssd_index import Index
from omlxd.cache.store import BLOCK

SUFFIX = {0: ".block.safetensors", 1: ".checkpoint.safetensors"}
PART = ".part.safetensors"
IDENTITY = re.compile(r"[0-9a-f]{64}")
FILE = re.compile(r"([0-9a-f]{64})\.(block|checkpoint)\.safetensors")
LEFTOVER = re.compile(r"[0-9a-f]{64}\.(block|checkpoint)\.part\.safetensors")
INDEX, LOCK, QUARANTINE, SESSIONS = "index.sqlite", ".lock", "quarantine", "sessions"
OURS = frozenset({INDEX, f"{INDEX}-wal", f"{INDEX}-shm", LOCK, QUARANTINE, SESSIONS})


class Unavailable(CacheError):
    """The directory cannot be used now; `reason` is for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tier is to be. `memo` is a file, outside of it, that remembers whether that was another disk."""

    directory: Path
    memo: Path

    def file(self, identity: str, kind: int, key: bytes) -> Path:
        return self.directory / identity / f"{key.hex()}{SUFFIX[kind]}"

    def part(self, identity: str, kind: int, key: bytes) -> Path:
        word = "block" if kind == BLOCK else "checkpoint"
        return self.directory / identity / f"{key.hex()}.{word}{PART}"

    @property
    def index(self) -> Path:
        return self.directory / INDEX


class Volume:
    """An open directory that this process owns."""

    def __init__(self, place: Place, disk: Disk, *, index_is_broken: bool = False) -> None:
        """Raises Unavailable, ReadOnly."""
        self.place = place
        self.index_was_lost = False
        self._disk = disk
        self._made: set[str] = set()
        try:
            _prepare(place, disk)
            self._lock = _locked(place)
        except OSError as error:
            raise Unavailable(_said(error, place.directory)) from error
        try:
            self.index = self._open_index(index_is_broken)
        except (OSError, sqlite3.Error) as error:
            os.close(self._lock)
            raise Unavailable(f"{place.index}: {error}") from error

    def _open_index(self, is_broken: bool) -> Index:
        path = self.place.index
        self.index_was_lost = not path.exists() and any(map(IDENTITY.fullmatch, os.listdir(self.place.directory)))
        if not is_broken:
            try:
                return Index(path)
            except sqlite3.OperationalError:
                raise  # no room, no access: nothing is wrong with the file
            except sqlite3.DatabaseError:
                pass
        for name in (INDEX, f"{INDEX}-wal", f"{INDEX}-shm"):
            (self.place.directory / name).unlink(missing_ok=True)
        self.index_was_lost = True
        return Index(path)

    @property
    def is_there(self) -> bool:
        """Whether the path still leads to the directory that was opened."""
        try:
            now = os.stat(self.place.directory / LOCK)
        except OSError:
            return False
        then = os.fstat(self._lock)
        return (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino)

    def make_directory(self, identity: str) -> None:
        """Raises OSError."""
        if identity not in self._made:
            self._disk.make_directory(self.place.directory / identity)
            self._made.add(identity)

    def close(self) -> None:
        with suppress(sqlite3.Error):  # its drive has gone; there is nothing to save
            self.index.close()
        os.close(self._lock)


class ReadOnly(CacheError):
    """Another process owns the directory."""

    def __init__(self, directory: Path, holder: str) -> None:
        self.reason = f"{directory} belongs to another process ({holder}); this one only reads it"
        super().__init__(self.reason)


def _prepare(place: Place, disk: Disk) -> None:
    directory = place.directory
    near = directory if directory.exists() else directory.parent
    if not near.is_dir():
        raise Unavailable(f"{near} is not there; it is waited for")
    elsewhere = disk.device(near) != disk.device(place.memo.parent)
    if _was_elsewhere(place) and not elsewhere:
        raise Unavailable(f"the drive that holds {directory} is not mounted; it is waited for")
    disk.make_directory(directory)
    _remember(place, elsewhere)


def _was_elsewhere(place: Place) -> bool:
    try:
        said = json.loads(place.memo.read_text())
        return bool(said["dir"] == str(place.directory) and said["other_disk"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remember(place: Place, elsewhere: bool) -> None:
    """Only another disk can go away, so only that is worth a file."""
    if not elsewhere:
        if place.memo.exists():
            place.memo.unlink()
        return
    if _was_elsewhere(place):
        return
    fd = os.open(place.memo, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
    with open(fd, "w") as file:
        json.dump({"dir": str(place.directory), "other_disk": True}, file)


def _locked(place: Place) -> int:
    fd = os.open(place.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 100, 0).decode(errors="replace").strip()
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ReadOnly(place.directory, holder or "unknown") from error
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"pid {os.getpid()}".encode(), 0)
    return fd


def _said(error: OSError, directory: Path) -> str:
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{directory} cannot be written: {error.strerror}"
    return f"{directory}: {error.strerror or type(error).__name__}"
