"""`omlxctl tokenize`. Main thread only."""

from __future__ import annotations

import argparse

from omlxd.cli.context import Context
from omlxd.cli.errors import DONE
from omlxd.cli.generation import checked, model_argument, read_stdin
from omlxd.cli.parser import Parser
from omlxd.cli.work import perform


class Tokenize:
    """The ids on one line, their number beside it."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument("model", metavar="MODEL")
        parser.add_argument("text", metavar="TEXT|-", nargs="?", default="-", help="- (the default) is standard input")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        text = read_stdin("the text") if given.text == "-" else checked(given.text, "TEXT")
        params = {"model": model_argument(checked(given.model, "MODEL")), "text": text}
        with context.connect_to_work() as client:
            result = perform(client, "tokenize", params, context.console, with_progress=False)
        if context.console.json:
            context.console.document(result)
        else:
            context.console.line(" ".join(str(token) for token in result["tokens"]))
            context.console.note(f"{result['count']} tokens")
        return DONE
