"""The shape of a command, for the type checker; `main` holds the table of them.

Importing a command's module must cost nothing to the other commands, so nobody imports this file at run time.
"""

from __future__ import annotations

import argparse
from typing import Protocol

from omlxd.cli.context import Context
from omlxd.cli.parser import Parser


class Command(Protocol):
    """One word of `omlxctl`."""

    def arguments(self, parser: Parser) -> None:
        """Declares the command's own arguments; the global flags are there already."""
        ...

    def run(self, context: Context, given: argparse.Namespace) -> int:
        """Does it and returns the exit code. Raises CliError, RpcError, DaemonUnreachable, ConfigError."""
        ...
