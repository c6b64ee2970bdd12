"""The flags for what an answer is held to: its reasoning, a JSON schema, a pattern, a grammar.

Functions only; main thread. What they say goes to the daemon as it is, which knows the models and judges it.
"""

from __future__ import annotations

import argparse
import json

from omlxd.cli.errors import UsageError
from omlxd.cli.parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def add_demand_flags(parser: Parser) -> None:
    """Declares the flags that `demands` reads."""
    thinking = parser.add_mutually_exclusive_group()
    parser.declared += [
        thinking.add_argument("--think", action="store_true", help="let the model reason before it answers"),
        thinking.add_argument("--no-think", action="store_true", help="answer at once"),
    ]
    parser.add_argument("--think-budget", type=int, metavar="N", help="end the reasoning after N tokens")
    form = parser.add_mutually_exclusive_group()
    parser.declared += [
        form.add_argument("--json-object", action="store_true", help="answer with a JSON object"),
        form.add_argument("--json-schema", metavar="FILE|JSON", help="answer with JSON that this schema accepts"),
        form.add_argument("--regex", metavar="PATTERN", help="answer with text that this expression matches"),
        form.add_argument("--grammar", metavar="FILE", help="answer with text of this Lark grammar"),
    ]


def demands(given: argparse.Namespace) -> dict[str, Any]:
    """The parameters that the flags come to. Raises UsageError for a file that cannot be read or is no schema."""
    found: dict[str, Any] = {}
    if given.think or given.no_think or given.think_budget is not None:
        found["thinking"] = {"enabled": not given.no_think}
        if given.think_budget is not None:
            found["thinking"]["budget_tokens"] = given.think_budget
    form = _form(given)
    return found if form is None else {**found, "response_format": form}


def _form(given: argparse.Namespace) -> dict[str, Any] | None:
    if given.json_object:
        return {"type": "json_object"}
    if given.json_schema is not None:
        return {"type": "json_schema", "schema": _schema(given.json_schema)}
    if given.regex is not None:
        return {"type": "regex", "pattern": given.regex}
    if given.grammar is not None:
        return {"type": "grammar", "lark": _read(given.grammar, "--grammar")}
    return None


def _schema(word: str) -> Any:
    text = word if word.lstrip().startswith("{") else _read(word, "--json-schema")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--json-schema is no JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise UsageError("--json-schema takes an object, as JSON or in a file")
    return schema


def _read(path: str, flag: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag}: {path} cannot be read: {error}") from error
