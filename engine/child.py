"""A child process run to its end: its lines are heard as they come, and it dies when its work is no longer wanted.

Called on worker threads by what runs foreign code (pip, the GGUF converter). The child is killed and reaped on every
way out. Raises what `heard` and `check` raise.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

# Without -P the current directory, which is whatever the user started the daemon in, would come before the library.
PYTHON = (sys.executable, "-P")
_POLL_S = 0.1
_CHUNK_BYTES = 65536
_TAIL_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: its exit status (negative: the signal that killed it) and the last it said on stderr."""

    status: int
    complaint: str


def run_child(
    command: Sequence[str],
    *,
    heard: Callable[[str], None],
    check: Callable[[], None],
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Runs a command; `heard` gets each line of its stdout, `check` is called ten times a second and may raise."""
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints, env=environment
        )
        assert process.stdout is not None
        with process:
            try:
                for line in _lines(process.stdout, check):
                    heard(line)
                return Ended(process.wait(), _tail(complaints))
            finally:
                process.kill()


def _lines(stream: IO[bytes], check: Callable[[], None]) -> Iterator[str]:
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            check()
            if not selector.select(_POLL_S):
                continue
            chunk = os.read(stream.fileno(), _CHUNK_BYTES)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)


def _tail(complaints: IO[bytes]) -> str:
    complaints.seek(0)
    return complaints.read().decode("utf-8", "replace")[-_TAIL_CHARACTERS:].strip()
