"""`omlxctl cache stats|inspect|explain|warm|verify|clear`: what prompts are kept, why one is not, keeping and dropping.

Main thread only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence

from omlxd.cli.cache_tree import inspect
from omlxd.cli.context import Context
from omlxd.cli.disk_line import disk_line
from omlxd.cli.errors import DONE, UsageError
from omlxd.cli.generation import checked, model_argument, read_stdin
from omlxd.cli.parser import Parser
from omlxd.cli.tables import size, table
from omlxd.cli.work import perform

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Action = Callable[[Context, argparse.Namespace], None]

# how few, how many
_WORDS = {"stats": (0, 1), "inspect": (1, 1), "explain": (1, 2), "warm": (1, 2), "verify": (0, 1), "clear": (0, 1)}
_WORDS_HELP = "the model; for explain and warm then the prompt, - (the default) from standard input"
_REASONS = {
    "full": "all of it is stored, but for the token that is computed in any case",
    "differs": "it differs from what is stored",
    "no_checkpoint": "the model can go on from a checkpoint only, and none is at this place",
    "evicted": "what comes before was dropped to make room",
    "bad_block": "a block on disk could not be read",
    "nothing_stored": "nothing is stored that begins like it",
    "disabled": "the model runs without a cache",
}


def add_prompt_flags(parser: Parser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--text", action="store_true", help="the prompt as `complete` sends it, without a template")
    parser.add_argument("--messages", action="store_true", help="the prompt is a JSON array of messages")


class Cache:
    """The prefix cache: a prompt that was computed once is not computed again."""

    def arguments(self, parser: Parser) -> None:
        parser.usage = (
            "omlxctl cache stats|verify|clear [MODEL] | inspect MODEL | explain|warm MODEL [PROMPT|-] [options]"
        )
        parser.add_argument(
            "action",
            choices=list(_WORDS),
            help="show what the caches did and hold, the tree of what is stored, why a prompt would hit or miss;"
            " compute and keep one; read every file on disk; drop what is stored",
        )
        parser.add_argument("words", nargs="*", default=[], metavar="MODEL PROMPT", help=_WORDS_HELP)
        add_prompt_flags(parser)
        parser.add_argument("--limit", type=int, metavar="N", help="how many nodes inspect shows (default: 100)")
        parser.add_argument("--session", metavar="NAME", help="inspect shows what this session holds")
        parser.add_argument("--tier", choices=["all", "hot", "ssd"], help="what clear drops (default: all)")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        few, many = _WORDS[given.action]
        if not few <= len(given.words) <= many:
            wanted = str(few) if few == many else f"{few} or {many}"
            raise UsageError(f"cache {given.action} takes {wanted} words, not {len(given.words)}")
        actions: dict[str, Action] = {
            "stats": _stats,
            "inspect": inspect,
            "explain": _explain,
            "warm": _warm,
            "verify": _verify,
            "clear": _clear,
        }
        actions[given.action](context, given)
        return DONE


def _stats(context: Context, given: argparse.Namespace) -> None:
    with context.connect() as client:
        lines = perform(client, "cache.stats", _model(given), context.console, with_progress=False)
        status = (
            None if context.console.json else perform(client, "daemon.status", {}, context.console, with_progress=False)
        )
    console = context.console
    if console.json:
        console.document(lines)
    elif lines:
        head = ["MODEL", "HITS", "MISSES", "REUSED", "COMPUTED", "HOT/SSD", "CHECKPOINTS", "HOT", "SSD", "EVICTED"]
        console.line(table(head, [_row(line) for line in lines]))
    else:
        console.note("no model has a cache yet; the first request to one makes it")
    on_disk = None if status is None else disk_line(status["cache"])
    if on_disk is not None:
        console.line(f"on disk: {on_disk}")


def _row(line: Mapping[str, Any]) -> Sequence[str]:
    reused, computed = line["tokens_matched"], line["tokens_computed"]
    share = f" ({100 * reused // (reused + computed)} %)" if reused else ""
    return [
        line["model"],
        str(line["hits"]),
        str(line["misses"]),
        f"{reused}{share}",
        str(computed),
        f"{line['blocks']['hot']}/{line['blocks']['ssd']}",
        str(line["checkpoints"]),
        size(line["bytes"]["hot"]),
        size(line["bytes"]["ssd"]),
        str(line["evictions"]),
    ]


def _explain(context: Context, given: argparse.Namespace) -> None:
    params = {**_model(given), **prompt_params(given, given.words[1] if len(given.words) > 1 else "-")}
    with context.connect_to_work() as client:
        found = perform(client, "cache.explain", params, context.console, with_progress=False)
    console = context.console
    if console.json:
        console.document(found)
        return
    console.line(f"{found['matched_tokens']} of {found['prompt_tokens']} tokens would be reused: {_why(found)}")
    differs = found.get("differs_at")
    if differs is not None:
        console.line(f"stored  {_quoted(differs['stored_text'])}")
        console.line(f"prompt  {_quoted(differs['prompt_text'])}")


def _why(found: Mapping[str, Any]) -> str:
    reason: str = _REASONS.get(found["reason"], found["reason"])
    differs = found.get("differs_at")
    return reason if differs is None else f"{reason}, from token {differs['token']} on"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _warm(context: Context, given: argparse.Namespace) -> None:
    params = {**_model(given), **prompt_params(given, given.words[1] if len(given.words) > 1 else "-")}
    with context.connect_to_work() as client:
        usage = perform(client, "cache.warm", params, context.console)
    if context.console.json:
        context.console.document(usage)
    else:
        context.console.line(f"{usage['prompt_tokens']} tokens are warm, {usage['cached_tokens']} of them were before")


def _verify(context: Context, given: argparse.Namespace) -> None:
    with context.connect() as client:
        found = perform(client, "cache.verify", _model(given), context.console, with_progress=False)
    if context.console.json:
        context.console.document(found)
    else:
        context.console.line(f"{found['checked']} files read, {found['bad']} bad, {found['repaired']} repairs")


def _clear(context: Context, given: argparse.Namespace) -> None:
    params = _model(given) if given.tier is None else {**_model(given), "tier": given.tier}
    with context.connect() as client:
        result = perform(client, "cache.clear", params, context.console, with_progress=False)
    if context.console.json:
        context.console.document(result)
    else:
        context.console.line(f"{size(result['freed_bytes'])} freed")


def _model(given: argparse.Namespace) -> dict[str, Any]:
    return {"model": model_argument(checked(given.words[0], "MODEL"))} if given.words else {}


def prompt_params(given: argparse.Namespace, word: str) -> dict[str, Any]:
    """The prompt, `word` or standard input for "-", as `run` would send it, or as the flags say."""
    if given.text and (given.messages or given.system is not None):
        raise UsageError("--text is a prompt without messages; leave --messages and --system out")
    text = read_stdin("the prompt") if word == "-" else checked(word, "PROMPT")
    if given.text:
        return {"prompt": text}
    system = [] if given.system is None else [{"role": "system", "content": checked(given.system, "--system")}]
    return {"messages": [*system, *(_parsed(text) if given.messages else [{"role": "user", "content": text}])]}


def _parsed(text: str) -> list[Any]:
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the messages are not JSON: {error}") from error
    if not isinstance(messages, list):
        raise UsageError("the messages are a JSON array")
    return messages
