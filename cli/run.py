"""`omlxctl run` and `omlxctl complete`: one prompt, one answer, streamed.

Owns the rule that tells a model's name from a prompt when only one word is given. Main thread only.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from omlxd.cli.console import Console
from omlxd.cli.context import Context
from omlxd.cli.errors import DONE, UsageError
from omlxd.cli.generation import (
    add_generation_flags,
    checked,
    default_model,
    generation_params,
    is_model,
    list_models,
    model_argument,
    read_stdin,
    show_end,
)
from omlxd.cli.parser import Parser
from omlxd.cli.pictures import add_image_flag, content_with, picture_url
from omlxd.cli.work import perform
from omlxd.rpc.client import Client, RpcError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_WORDS_HELP = (
    "the model, then the prompt; - reads the prompt from standard input. One word alone is the model if it names one "
    "(the prompt then comes from standard input), else the prompt. Without MODEL: the setting models.default, else the "
    "only usable model, else the only one in memory"
)


class Run:
    """One user message, answered with the model's chat template; without a template, continued as plain text."""

    def arguments(self, parser: Parser) -> None:
        parser.usage = "omlxctl run [MODEL] [PROMPT|-] [options]"
        parser.add_argument("words", nargs="*", metavar="MODEL PROMPT", help=_WORDS_HELP)
        parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
        add_image_flag(parser)
        add_generation_flags(parser)

    def run(self, context: Context, given: argparse.Namespace) -> int:
        pictures = [picture_url(file) for file in given.image or ()]
        with context.connect_to_work() as client:
            model, prompt = _model_and_prompt(context, client, given.words)
            params = {"model": model, **generation_params(given)}
            messages: list[dict[str, Any]] = [{"role": "user", "content": content_with(prompt, pictures)}]
            if given.system is not None:
                messages.insert(0, {"role": "system", "content": checked(given.system, "--system")})
            try:
                result = _answer(client, "generate.chat", {**params, "messages": messages}, context.console)
            except RpcError as error:
                if not _has_no_template(error) or given.system is not None or pictures:
                    raise
                result = _answer(client, "generate.complete", {**params, "prompt": prompt}, context.console)
        return _end(context.console, result, verbose=given.verbose)


class Complete:
    """A text, continued as it stands; with --suffix, what belongs between the two."""

    def arguments(self, parser: Parser) -> None:
        parser.usage = "omlxctl complete [MODEL] [PROMPT|-] [options]"
        parser.add_argument("words", nargs="*", metavar="MODEL PROMPT", help=_WORDS_HELP)
        parser.add_argument("--suffix", metavar="TEXT", help="what follows the gap to be filled")
        add_generation_flags(parser)

    def run(self, context: Context, given: argparse.Namespace) -> int:
        with context.connect_to_work() as client:
            model, prompt = _model_and_prompt(context, client, given.words)
            params = {"model": model, "prompt": prompt, **generation_params(given)}
            if given.suffix is not None:
                params["suffix"] = checked(given.suffix, "--suffix")
            result = _answer(client, "generate.complete", params, context.console)
        return _end(context.console, result, verbose=given.verbose)


class Shown:
    """Where deltas go: the answer to standard output, the model's reasoning to standard error."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reasoning_open = False

    def __call__(self, delta: Mapping[str, Any]) -> None:
        text, channel = delta["text"], delta["channel"]
        if channel == "reasoning" and text:
            self._console.aside(text)
            self._reasoning_open = not text.endswith("\n")
        elif channel == "content":
            if self._reasoning_open:
                self._console.aside("\n")
                self._reasoning_open = False
            self._console.write(text)


def _answer(client: Client, method: str, params: Mapping[str, Any], console: Console) -> Any:
    return perform(client, method, params, console, show=None if console.json else Shown(console))


def _end(console: Console, result: Mapping[str, Any], *, verbose: bool) -> int:
    if console.json:
        console.document(result)
    else:
        console.end_line()
        show_end(console, result, verbose=verbose)
    return DONE


def _has_no_template(error: RpcError) -> bool:
    return isinstance(error.data, dict) and (error.data.get("kind"), error.data.get("what")) == ("unsupported", "chat")


def _model_and_prompt(context: Context, client: Client, words: list[str]) -> tuple[str, str]:
    if len(words) > 2:
        raise UsageError(f"a model and a prompt, not {len(words)} words; put the prompt in quotes")
    if len(words) == 2:
        return model_argument(checked(words[0], "MODEL")), _prompt(words[1])
    entries = list_models(client)
    if words and words[0] != "-" and not is_model(words[0], entries):
        return default_model(context, entries), _prompt(words[0])
    if os.isatty(0) and words != ["-"]:
        hint = f"; `omlxctl chat {words[0]}` talks with it" if words else ""
        raise UsageError(f"no prompt; give one in quotes, or - to read it from standard input{hint}")
    model = model_argument(words[0]) if words and words[0] != "-" else default_model(context, entries)
    return model, read_stdin("the prompt")


def _prompt(word: str) -> str:
    text = read_stdin("the prompt") if word == "-" else checked(word, "the prompt")
    if not text.strip():
        raise UsageError("the prompt is empty")
    return text
