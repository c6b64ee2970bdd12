"""What a command writes: results to standard output, everything else to standard error, a progress line on a terminal.

Owns file descriptors 1 and 2 and writes to them directly, as UTF-8 whatever the locale says, so that nothing is left in
a buffer to fail when the interpreter exits. Used by one thread.
"""

from __future__ import annotations

import errno
import json
import os
import select

from omlxd.cli.errors import CliError, OutputClosed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_STDOUT, _STDERR = 1, 2
# A model's output, a file's name or an error's text must not drive the terminal. Newline and tab stay; a carriage
# return would let a line overwrite itself; the others are shown as the pictures Unicode has for them.
_VISIBLE: dict[int, int | None] = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A, 0x0D)}
_VISIBLE |= {0x0D: None, 0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Console:
    """Standard output and error of one command. With `json`, standard output gets one document and nothing else."""

    def __init__(self, *, json: bool, quiet: bool) -> None:
        self.json = json
        self.quiet = quiet
        self.out_is_terminal = os.isatty(_STDOUT)
        self.err_is_terminal = os.isatty(_STDERR)
        self._progress_width = 0
        self._last_out = "\n"

    def write(self, text: str) -> None:
        """Result text as it comes. Raises OutputClosed when the reader has left, CliError when it cannot be written."""
        if not text:
            return
        self.clear_progress()
        self._last_out = text[-1]
        _write(_STDOUT, _printable(text) if self.out_is_terminal else text)

    def line(self, text: str) -> None:
        """A line of the result."""
        self.write(text + "\n")

    def end_line(self) -> None:
        """Ends the line that `write` left open, if it did."""
        if self._last_out != "\n":
            self.line("")

    def document(self, value: Any) -> None:
        """The one JSON document, in ASCII: it survives every locale, and no line separator of Unicode splits it."""
        self.line(json.dumps(value))

    def aside(self, text: str) -> None:
        """Text for people beside the result, such as reasoning; not with --quiet, and no newline is added."""
        if not self.quiet:
            self._to_stderr(text)

    def note(self, text: str) -> None:
        """A line for people beside the result; not with --quiet."""
        self.aside(_one_line(text) + "\n")

    def error(self, text: str) -> None:
        """A line that says what failed."""
        self._to_stderr(f"error: {_one_line(text)}\n")

    def detail(self, text: str) -> None:
        """A line that belongs to the error before it."""
        self._to_stderr(f"  {_one_line(text)}\n")

    def progress(self, text: str) -> None:
        """Draws the progress line over the last one. Only on a terminal, and without escape codes even there."""
        if self.quiet or not self.err_is_terminal:
            return
        shown = _printable(text)[: _terminal_columns() - 1]
        self._err("\r" + shown.ljust(self._progress_width))
        self._progress_width = len(shown)

    def clear_progress(self) -> None:
        """Takes the progress line away."""
        if self._progress_width:
            self._err("\r" + " " * self._progress_width + "\r")
            self._progress_width = 0

    def _to_stderr(self, text: str) -> None:
        self.clear_progress()
        self._err(_printable(text) if self.err_is_terminal else text)

    def _err(self, text: str) -> None:
        try:
            _write(_STDERR, text)
        except (OutputClosed, CliError):
            return  # with nobody reading errors there is nobody to tell


def claim_standard_streams() -> None:
    """Opens /dev/null for each of 0, 1 and 2 that is closed, lest the daemon's socket become our standard output."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


def _write(descriptor: int, text: str) -> None:
    rest = memoryview(text.encode("utf-8", "replace"))  # a lone surrogate has no UTF-8
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # whoever started us made the pipe non-blocking
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise OutputClosed from None
            raise CliError(f"cannot write the output: {error.strerror}") from error


def _printable(text: str) -> str:
    return text.translate(_VISIBLE)


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _terminal_columns() -> int:
    try:
        return os.get_terminal_size(_STDERR).columns or 80
    except OSError:
        return 80
