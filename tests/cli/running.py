"""Runs `omlxctl` as its own process in a home of its own, with pipes or on a pseudo-terminal."""

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

OMLXCTL = (sys.executable, "-c", "import sys; from omlxd.cli.main import main; sys.exit(main())")


class Home:
    """A short-named directory (a socket path has 102 bytes at most) and the environment that points to it."""

    def __init__(self, path: Path) -> None:
        self.path = path / "h"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OMLXD_")}
        self.env = {**kept, "OMLXD_HOME": str(self.path), "HOME": str(path)}
        self.socket = str(self.path / "omlxd.sock")

    def start(self, *arguments: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*OMLXCTL, *arguments], env={**self.env, **(env or {})}, **{**pipes, **options})

    def run(self, *arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> "Outcome":
        with self.start(*arguments, env=env, stdin=subprocess.PIPE) as process:
            out, err = process.communicate(stdin, timeout=60)
        return Outcome(process.returncode, out, err)


class Outcome:
    """What a finished `omlxctl` left behind."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def errors(self) -> list[str]:
        return self.err.decode().splitlines()

    @property
    def document(self) -> Any:
        """Standard output as the one JSON document that --json promises."""
        assert self.out.endswith(b"\n")
        assert self.out.count(b"\n") == 1
        return json.loads(self.out)

    def __repr__(self) -> str:
        return f"<code {self.code}, out {self.out!r}, err {self.err!r}>"


class Terminal:
    """An `omlxctl` on a pseudo-terminal of 80 columns: standard input, output and error are all the terminal."""

    def __init__(self, home: Home, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        self.process = home.start(
            *arguments,
            env={"TERM": "xterm", **(env or {})},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self.seen = b""

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def wait_for(self, text: bytes, *, after: int = 0) -> None:
        """Reads until the output has `text` beyond its first `after` bytes."""
        while text not in self.seen[after:]:
            assert select.select([self._ours], [], [], 30)[0], f"{text!r} does not come; seen {self.seen!r}"
            self.seen += os.read(self._ours, 65536)

    def interrupt_until(self, text: bytes) -> None:
        """Presses Ctrl-C, again every second, until the output has `text` beyond what it has now.

        Once is not enough for a fast typist: CPython's readline sees a signal while it waits for a key, and misses one
        that comes while it still echoes the key before, until the next.
        """
        after = len(self.seen)
        for _ in range(30):
            self.type(b"\x03")
            while select.select([self._ours], [], [], 1)[0]:
                self.seen += os.read(self._ours, 65536)
                if text in self.seen[after:]:
                    return
        raise AssertionError(f"{text!r} does not come; seen {self.seen!r}")

    def end(self) -> int:
        """Reads to the end and gives the exit code."""
        while select.select([self._ours], [], [], 30)[0]:
            try:
                chunk = os.read(self._ours, 65536)
            except OSError:  # what Linux says when the last process has closed the terminal
                break
            if not chunk:
                break
            self.seen += chunk
        return self.process.wait(30)

    def close(self) -> None:
        os.close(self._ours)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that a typed Ctrl-C becomes SIGINT


def temporary_home() -> Iterator[Home]:
    directory = Path(tempfile.mkdtemp(prefix="omlxctl."))
    yield Home(directory)
    deadline = time.monotonic() + 10
    while directory.exists():
        try:
            shutil.rmtree(directory)
        except OSError:  # a daemon that has closed its socket still has its last files to put away
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
