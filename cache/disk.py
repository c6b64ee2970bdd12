"""The disk as the SSD tier sees it: whole files written under a temporary name and renamed, and read whole.

Stateless; called on the writer and reader threads. Every touch of the disk is one method here, so that a test can hand
in a disk that is full, slow, or ends the process at a chosen point.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

PRIVATE_FILE, PRIVATE_DIRECTORY = 0o600, 0o700


class Disk:
    """The real one. All methods raise OSError."""

    def write(self, path: Path, parts: Sequence[bytes], *, durable: bool = False) -> None:
        """Makes a file that must not exist yet, 0600. `durable` waits until the drive says that it has it."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE)
        try:
            self.fill(fd, parts)
            if durable:
                self.sync(fd)
        finally:
            os.close(fd)

    def fill(self, fd: int, parts: Iterable[bytes]) -> None:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(fd, rest) :]

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def read(self, path: Path) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb", buffering=0) as file:
            return file.read()

    def head(self, path: Path, num_bytes: int) -> bytes:
        """The file's first bytes, fewer where it is shorter."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            return file.read(num_bytes)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def list(self, path: Path) -> Iterator[os.DirEntry[str]]:
        with os.scandir(path) as entries:
            yield from entries

    def make_directory(self, path: Path) -> None:
        """Makes one directory, 0700, whose parent must exist; one that is there already is left as it is."""
        try:
            os.mkdir(path, PRIVATE_DIRECTORY)
        except FileExistsError:
            if not path.is_dir():
                raise

    def device(self, path: Path) -> int:
        """Which file system a path is on."""
        return os.stat(path).st_dev

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free
