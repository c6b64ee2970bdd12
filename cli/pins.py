"""The commands `pin`, `unpin` and `rm`: what stays in memory, and what leaves the disk. Main thread only."""

from __future__ import annotations

import argparse

from omlxd.cli.context import Context
from omlxd.cli.errors import DONE
from omlxd.cli.generation import checked, model_argument
from omlxd.cli.parser import Parser
from omlxd.cli.tables import size
from omlxd.cli.work import perform

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Pin:
    """Keeps a loaded model in memory, whatever else is wanted."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument("model", metavar="MODEL")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        return _say(context, _ask(context, given, "models.pin"), "pinned {name}")


class Unpin:
    """Lets a model go when its memory is wanted, or its idle time is over."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument("model", metavar="MODEL")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        return _say(context, _ask(context, given, "models.unpin"), "unpinned {name}")


class Rm:
    """Deletes a model that was pulled, and that is not in memory."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument("model", metavar="MODEL")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        removed = _ask(context, given, "models.remove")
        freed = size(removed["removed_bytes"])
        return _say(context, removed, f"removed {given.model}, {freed} freed")


def _ask(context: Context, given: argparse.Namespace, method: str) -> Any:
    params = {"model": model_argument(checked(given.model, "MODEL"))}
    connect = context.connect_or_start if method == "models.remove" else context.connect  # no daemon pins nothing
    with connect() as client:
        return perform(client, method, params, context.console, with_progress=False)


def _say(context: Context, result: Any, text: str) -> int:
    if context.console.json:
        context.console.document(result)
    else:
        context.console.line(text.format(**result))
    return DONE
