"""`omlxctl top`: a live view of models, requests, memory and cache, drawn anew every second until q or Ctrl-C.

Draws on the terminal's other screen and leaves the first as it was. Without a terminal it prints one reading and ends.
Plain escape codes and termios: curses takes longer to load than all the rest of this command. Main thread only.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from omlxd.cli.context import ANSWER_WITHIN_S, Context
from omlxd.cli.errors import DONE, UsageError
from omlxd.cli.frame import ALARM, FAINT, GOOD, STRONG, WARN, Line, frame
from omlxd.cli.parser import Parser, finite
from omlxd.rpc.client import Client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_TOP_LEFT, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_LOOKS = {STRONG: "\x1b[1m", FAINT: "\x1b[2m", GOOD: "\x1b[32m", WARN: "\x1b[33m", ALARM: "\x1b[1;31m"}
_AS_BEFORE = "\x1b[m"
_LEAST_S = 0.1


class Top:
    """What the daemon is doing, live."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument("--every", type=finite, metavar="S", help="seconds between two readings (default: 1)")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        every_s = 1.0 if given.every is None else given.every
        if every_s < _LEAST_S:
            raise UsageError(f"--every {every_s:g} is too often: {_LEAST_S:g} s is the least")
        console = context.console
        with context.connect() as client:
            if console.json:
                console.document(_read(client))
            elif console.out_is_terminal and os.isatty(0):
                # https://no-color.org
                self._live(client, every_s, colours=not context.env.get("NO_COLOR"))
            else:
                lines = frame(_read(client), None, at=time.time(), columns=10_000, rows=10_000)
                console.line("\n".join(text for text, _ in lines))
        return DONE

    def _live(self, client: Client, every_s: float, *, colours: bool) -> None:
        before: Any = None
        with _screen():
            while True:
                now = _read(client)
                size = os.get_terminal_size(1)
                # A terminal that does not know its size says 0.
                lines = frame(now, before, at=time.time(), columns=size.columns or 80, rows=(size.lines or 24) - 1)
                _draw(lines, _LOOKS if colours else {})
                before = now
                if _pressed(every_s) in (b"q", b"Q"):
                    return


def _read(client: Client) -> Any:
    return client.call("daemon.status", timeout_s=ANSWER_WITHIN_S)


def _draw(lines: list[Line], looks: Mapping[str, str]) -> None:
    _put(_TOP_LEFT + "".join(_drawn(text, looks.get(look)) + "\r\n" for text, look in lines) + _REST_OF_SCREEN)


def _drawn(text: str, look: str | None) -> str:
    # A model's name is text from outside: it must not drive the terminal.
    shown = "".join(each if each.isprintable() else "?" for each in text)
    return (f"{look}{shown}{_AS_BEFORE}" if look is not None else shown) + _REST_OF_LINE


def _put(text: str) -> None:
    rest = memoryview(text.encode("utf-8", "replace"))
    while rest:
        rest = rest[os.write(1, rest) :]


def _pressed(within_s: float) -> bytes:
    return os.read(0, 1) if select.select([0], [], [], within_s)[0] else b""


@contextmanager
def _screen() -> Iterator[None]:
    """The other screen, with keys that come as they are pressed; all as before at the end, however it comes."""
    saved = termios.tcgetattr(0)
    keys = termios.tcgetattr(0)
    keys[3] &= ~(termios.ICANON | termios.ECHO)
    sys.stdout.flush()
    try:
        termios.tcsetattr(0, termios.TCSADRAIN, keys)
        _put(_OTHER_SCREEN)
        yield
    finally:
        _put(_FIRST_SCREEN)
        termios.tcsetattr(0, termios.TCSADRAIN, saved)
