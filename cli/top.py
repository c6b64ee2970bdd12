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
from collections.abc import Iterator
from contextlib import contextmanager

from omlxd.cli.context import ANSWER_WITHIN_S, Context
from omlxd.cli.errors import DONE, UsageError
from omlxd.cli.frame import frame
from omlxd.cli.parser import Parser, finite
from omlxd.rpc.client import Client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_TOP_LEFT, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
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
                self._live(client, every_s)
            else:
                console.line("\n".join(frame(_read(client), None, columns=10_000, rows=10_000)))
        return DONE

    def _live(self, client: Client, every_s: float) -> None:
        before: Any = None
        with _screen():
            while True:
                now = _read(client)
                size = os.get_terminal_size(1)
                # A terminal that does not know its size says 0.
                lines = frame(now, before, columns=size.columns or 80, rows=(size.lines or 24) - 1)
                _draw(lines)
                before = now
                if _pressed(every_s) in (b"q", b"Q"):
                    return


def _read(client: Client) -> Any:
    return client.call("daemon.status", timeout_s=ANSWER_WITHIN_S)


def _draw(lines: list[str]) -> None:
    # A model's name is text from outside: it must not drive the terminal.
    shown = ("".join(each if each.isprintable() else "?" for each in line) for line in lines)
    _put(_TOP_LEFT + "".join(line + _REST_OF_LINE + "\r\n" for line in shown) + _REST_OF_SCREEN)


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
