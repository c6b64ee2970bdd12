"""`omlxctl rpc METHOD [JSON]`: any method, with the parameters as they are written. Main thread only."""

from __future__ import annotations

import argparse
import json

from omlxd.cli.context import Context
from omlxd.cli.errors import DONE, UsageError
from omlxd.cli.generation import checked, read_stdin
from omlxd.cli.parser import Parser
from omlxd.cli.work import interruptible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Rpc:
    """Prints the result; notifications that come before it go to standard error, one JSON text per line."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument("method", metavar="METHOD", help="a name of `omlxctl rpc rpc.discover`")
        parser.add_argument("params", metavar="JSON|-", nargs="?", help="its parameters; - reads them from stdin")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        console = context.console
        params = None if given.params is None else _params(given.params)

        def show(value: Any) -> None:
            console.note(json.dumps(value))

        def show_notification(method: str, params: Any) -> None:
            show({"method": method, "params": params})

        with context.connect_or_start(on_notification=show_notification) as client:
            result = interruptible(client, checked(given.method, "METHOD"), params, show)
        if console.json:
            console.document(result)
        else:
            console.line(json.dumps(result, indent=2, ensure_ascii=False))
        return DONE


def _params(text: str) -> Any:
    text = read_stdin("JSON") if text == "-" else checked(text, "JSON")
    try:
        params = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the parameters are not JSON: {error}") from error
    if not isinstance(params, dict | list):
        raise UsageError('the parameters are a JSON object or array, such as \'{"model": "demo"}\'')
    return params
