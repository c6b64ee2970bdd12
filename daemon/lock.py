"""One daemon per home, and one per socket path.

Owns the lock files: an flock, which the kernel drops with the process, so that a crash leaves nothing to clean up. The
pid inside is for people; nobody trusts it. Taken by `daemon.main` before any thread starts.
"""

from __future__ import annotations

import fcntl
import os


class AlreadyRunning(Exception):
    """Another process holds the lock."""

    def __init__(self, path: str, holder: str) -> None:
        super().__init__(f"already running: {holder} holds {path}; `omlxctl shutdown` ends it")
        self.path = path
        self.holder = holder


class InstanceLock:
    """A held lock. Its file stays for ever: removing it would let two processes lock two files of one name."""

    def __init__(self, path: str, version: str) -> None:
        """Takes the lock or raises AlreadyRunning, at once. Raises OSError where the file cannot be opened."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(self._fd)
            os.close(self._fd)
            raise AlreadyRunning(path, holder) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"pid {os.getpid()}, version {version}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> InstanceLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _holder(fd: int) -> str:
    text = os.pread(fd, 200, 0).decode(errors="replace").strip()
    return f"a daemon ({text})" if text else "a daemon that is just starting"
