"""The command line's grammar: argparse with this program's manners.

Owns the flags that every command has. Errors are raised, not printed, so that --json can say them; help is raised too
and written by the console, which knows about closed pipes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from omlxd.cli.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn


# Before a word that stands behind `--`. argparse of Python 3.11 forgets the `--` when words and options are mixed, and
# takes the word for an option; no argument of a process can hold this character.
_WORD = "\0"


class HelpRequested(Exception):
    """-h was given; `text` is what to show."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> None:
        raise HelpRequested(parser.format_help())


def _formatter(prog: str) -> argparse.HelpFormatter:
    # argparse finds the width out by importing shutil, for every argument, in every command: 5 ms.
    return argparse.RawDescriptionHelpFormatter(prog, width=100)


class Parser(argparse.ArgumentParser):
    """One command's parser. Remembers its arguments in `declared`, for the completion scripts."""

    def __init__(self, command: str, summary: str, epilog: str | None = None) -> None:
        self.declared: list[argparse.Action] = []
        super().__init__(
            prog=f"omlxctl {command}",
            description=summary,
            epilog=epilog,
            add_help=False,
            allow_abbrev=False,
            formatter_class=_formatter,
        )
        self.color = False  # from Python 3.14 on, help has escape codes otherwise

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        self.declared.append(action)
        return action

    def add_global_flags(self) -> None:
        """The flags of every command; --socket is None when absent, the others are False."""
        self.add_argument("--json", action="store_true", help="one JSON document on standard output, nothing else")
        self.add_argument("--socket", metavar="PATH", help="the daemon's socket (default: what `omlxctl socket` says)")
        self.add_argument("-q", "--quiet", action="store_true", help="results and errors only")
        self.add_argument("--no-start", action="store_true", help="do not start a daemon when none answers")
        self.add_argument("--version", action="store_true", help="print the version of omlxctl and stop")
        self.add_argument("-h", "--help", action=_Help, nargs=0, help="show this help and stop")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses options and words in any order; what follows `--` are words. Raises UsageError, HelpRequested."""
        given = list(arguments)
        if "--" in given:
            end = given.index("--")
            given = [*given[:end], *(_WORD + word for word in given[end + 1 :])]
        read = self.parse_intermixed_args(given)
        return argparse.Namespace(**{name: _without_mark(value) for name, value in vars(read).items()})

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.replace(_WORD, '')}; `{self.prog} --help` shows what it takes")


def _without_mark(value: object) -> object:
    if isinstance(value, str):
        return value.removeprefix(_WORD)
    return [_without_mark(each) for each in value] if isinstance(value, list) else value


def finite(text: str) -> float:
    """An argparse type: a number that JSON can carry. Raises ValueError for NaN and infinities too."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value
