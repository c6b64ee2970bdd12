"""`omlxctl session save|list|rm|export|import`: names for conversations whose state is kept. Main thread only."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from omlxd.cli.cache import add_prompt_flags, prompt_params
from omlxd.cli.context import Context
from omlxd.cli.errors import DONE, UsageError
from omlxd.cli.generation import absolute, checked, model_argument
from omlxd.cli.parser import Parser
from omlxd.cli.tables import size, span, table
from omlxd.cli.work import perform

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Action = Callable[[Context, argparse.Namespace], None]

_WORDS = {"save": (2, 3), "list": (0, 1), "rm": (2, 2), "export": (3, 3), "import": (3, 3)}  # how few, how many


class Session:
    """Sessions: a conversation's state under a name, for as long as it is wanted."""

    def arguments(self, parser: Parser) -> None:
        parser.usage = (
            "omlxctl session save MODEL NAME [PROMPT|-] | list [MODEL] | rm MODEL NAME | export|import MODEL NAME PATH"
        )
        parser.add_argument(
            "action",
            choices=list(_WORDS),
            help="compute a prompt and hold it under a name, show the names, forget one, write one to a file, read one",
        )
        parser.add_argument(
            "words", nargs="*", default=[], metavar="MODEL NAME ...", help="the model, the name, then what it says"
        )
        add_prompt_flags(parser)
        parser.add_argument("--replace", action="store_true", help="save under a name that is there already")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        few, many = _WORDS[given.action]
        if not few <= len(given.words) <= many:
            wanted = str(few) if few == many else f"{few} or {many}"
            raise UsageError(f"session {given.action} takes {wanted} words, not {len(given.words)}")
        actions: dict[str, Action] = {
            "save": _save,
            "list": _list,
            "rm": _remove,
            "export": _export,
            "import": _import,
        }
        actions[given.action](context, given)
        return DONE


def _save(context: Context, given: argparse.Namespace) -> None:
    params = {**_named(given), **prompt_params(given, given.words[2] if len(given.words) > 2 else "-")}
    if given.replace:
        params["replace"] = True
    with context.connect_to_work() as client:
        saved = perform(client, "sessions.save", params, context.console)
    _say(context, saved, f"saved {saved['name']}: {saved['tokens']} tokens, {size(saved['bytes'])} held on disk")


def _list(context: Context, given: argparse.Namespace) -> None:
    params = {"model": model_argument(checked(given.words[0], "MODEL"))} if given.words else {}
    with context.connect() as client:
        sessions = perform(client, "sessions.list", params, context.console, with_progress=False)
    console = context.console
    if console.json:
        console.document(sessions)
    elif sessions:
        now = time.time()
        rows = [
            [each["name"], each["model"], str(each["tokens"]), size(each["bytes"]), span(now - each["last_used"])]
            for each in sessions
        ]
        console.line(table(["NAME", "MODEL", "TOKENS", "SIZE", "USED"], rows))
    else:
        console.note("no sessions yet; `omlxctl session save` makes one")


def _remove(context: Context, given: argparse.Namespace) -> None:
    with context.connect() as client:
        gone = perform(client, "sessions.delete", _named(given), context.console, with_progress=False)
    _say(context, gone, f"removed {gone['name']}; what it held stays in the cache until room is needed")


def _export(context: Context, given: argparse.Namespace) -> None:
    params = {**_named(given), "path": absolute(checked(given.words[2], "PATH"))}
    with context.connect_to_work() as client:
        done = perform(client, "sessions.export", params, context.console, with_progress=False)
    _say(context, done, f"exported {done['name']}: {done['tokens']} tokens, {size(done['bytes'])}")


def _import(context: Context, given: argparse.Namespace) -> None:
    params = {**_named(given), "path": absolute(checked(given.words[2], "PATH"))}
    with context.connect_to_work() as client:
        done = perform(client, "sessions.import", params, context.console, with_progress=False)
    _say(context, done, f"imported {done['name']}: {done['tokens']} tokens")


def _named(given: argparse.Namespace) -> dict[str, Any]:
    return {"model": model_argument(checked(given.words[0], "MODEL")), "name": checked(given.words[1], "NAME")}


def _say(context: Context, document: Any, line: str) -> None:
    if context.console.json:
        context.console.document(document)
    else:
        context.console.line(line)
