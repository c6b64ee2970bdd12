"""The commands that need next to nothing: `ping`, `socket`, `shutdown`. None of them starts a daemon."""

from __future__ import annotations

import argparse

from omlxd.cli.context import ANSWER_WITHIN_S, Context
from omlxd.cli.errors import DONE
from omlxd.cli.parser import Parser, finite


class Ping:
    """Whether a daemon answers."""

    def arguments(self, parser: Parser) -> None:
        pass

    def run(self, context: Context, given: argparse.Namespace) -> int:
        with context.connect() as client:
            answer = client.call("ping", timeout_s=ANSWER_WITHIN_S)
        if context.console.json:
            context.console.document(answer)
        else:
            context.console.line(answer)
        return DONE


class Socket:
    """Where the socket is, for editors and scripts; nothing need listen there."""

    def arguments(self, parser: Parser) -> None:
        pass

    def run(self, context: Context, given: argparse.Namespace) -> int:
        if context.console.json:
            context.console.document({"socket": context.paths.socket})
        else:
            context.console.line(context.paths.socket)
        return DONE


class Shutdown:
    """Asks the daemon to end; returns when it has agreed, not when it has gone."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument(
            "--grace", type=finite, metavar="S", help="seconds that running requests are given (default: the setting)"
        )

    def run(self, context: Context, given: argparse.Namespace) -> int:
        params = {} if given.grace is None else {"grace_s": given.grace}
        with context.connect() as client:
            answer = client.call("daemon.shutdown", params, timeout_s=ANSWER_WITHIN_S)
        if context.console.json:
            context.console.document(answer)
        else:
            context.console.note("the daemon is shutting down")
        return DONE
