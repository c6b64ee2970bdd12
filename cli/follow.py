"""Reading a log file that is rotated while it is read: nothing is missed, and nothing comes twice.

Owns the open file. Used by one thread; never waits.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Sequence

_TAIL_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 16


class Follower:
    """Follows `path`, whose older parts are `path.1`, `path.2` and so on. There need be none of them yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def tail(self, num_lines: int) -> Sequence[str]:
        """The last lines of `path` as it is now; what is written later comes from `more`."""
        self._open(self._path)
        if self._file is None:
            return []
        end = os.fstat(self._file).st_size
        data, at = b"", end
        while at > 0 and data.count(b"\n") <= num_lines:
            size = min(_TAIL_BYTES, at)
            at -= size
            data = os.pread(self._file, size, at) + data
        os.lseek(self._file, end, os.SEEK_SET)
        return data.decode("utf-8", "replace").splitlines()[-num_lines:] if num_lines else []

    def more(self) -> str:
        """What has been written since; empty when that is nothing."""
        text = self._rest()
        while (following := self._following()) is not None:
            text += self._rest()  # what came before the rotation: nobody writes to that part any more
            self.close()
            self._open(following)
            text += self._rest()
        return text

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, path: str) -> None:
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return

    def _rest(self) -> str:
        if self._file is None:
            return ""
        if os.lseek(self._file, 0, os.SEEK_CUR) > os.fstat(self._file).st_size:
            os.lseek(self._file, 0, os.SEEK_SET)  # it was emptied
        chunks = []
        while chunk := os.read(self._file, _CHUNK_BYTES):
            chunks.append(chunk)
        return self._decode(b"".join(chunks))

    def _following(self) -> str | None:
        """The part after the one that is open; None while there is none."""
        parts = self._parts()
        if self._file is None:
            return self._path if parts and parts[-1][1] == self._path else None
        own = os.fstat(self._file)
        places = [place for place, (state, _) in enumerate(parts) if os.path.samestat(state, own)]
        if places:
            return next((path for _, path in parts[places[0] + 1 :]), None)
        # Ours was removed: what was finished before it has been read.
        return next((path for state, path in parts if state.st_mtime_ns >= own.st_mtime_ns), None)

    def _parts(self) -> list[tuple[os.stat_result, str]]:
        """The parts that exist, oldest first."""
        directory, name = os.path.split(self._path)
        pattern = re.compile(rf"{re.escape(name)}\.(\d+)")
        try:
            numbers = [int(match[1]) for one in os.listdir(directory) if (match := pattern.fullmatch(one))]
        except FileNotFoundError:
            return []
        found = []
        for path in [*(f"{self._path}.{number}" for number in sorted(numbers, reverse=True)), self._path]:
            try:
                found.append((os.stat(path), path))
            except FileNotFoundError:
                continue  # rotated since
        return found
