"""`omlxctl chat`: a conversation, kept here and sent whole with every message.

Owns the messages. At a terminal lines are edited with readline, Ctrl-C ends the answer and not the session; from a pipe
each line is one message. Main thread only.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from omlxd.cli.console import Console
from omlxd.cli.context import Context
from omlxd.cli.errors import DONE, Interrupted, UsageError
from omlxd.cli.generation import (
    add_generation_flags,
    checked,
    decode,
    default_model,
    generation_params,
    list_models,
    model_argument,
    show_end,
)
from omlxd.cli.parser import Parser
from omlxd.cli.pictures import add_image_flag, content_with, picture_url
from omlxd.cli.run import Shown
from omlxd.cli.work import perform
from omlxd.rpc.client import Client, RpcError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PROMPT = ">>> "
_HELP = """\
/image FILE   show a picture with the next message
/reset        forget the conversation
/help         show this
/quit         leave; so does Ctrl-D
Ctrl-C        end the answer, keep the conversation
"""


class Chat:
    """A conversation with one model."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument("model", nargs="?", metavar="MODEL", help="default: as for `omlxctl run`")
        parser.add_argument("--system", metavar="TEXT", help="a system message that stays through /reset")
        add_image_flag(parser)
        add_generation_flags(parser)

    def run(self, context: Context, given: argparse.Namespace) -> int:
        console = context.console
        pictures = [picture_url(file) for file in given.image or ()]
        with context.connect_to_work() as client:
            if given.model is None:
                model = default_model(context, list_models(client))
            else:
                model = model_argument(checked(given.model, "MODEL"))
            system = None if given.system is None else checked(given.system, "--system")
            talk = Conversation(client, console, {"model": model, **generation_params(given)}, system=system)
            talk.verbose = given.verbose
            talk.pictures = pictures
            interactive = os.isatty(0) and console.out_is_terminal and not console.json
            lines = _typed_lines(console) if interactive else _piped_lines()
            if interactive:
                console.note(f"{model}; /help lists the commands")
            for line in lines:
                if not _obey(talk, line, console, interactive=interactive):
                    break
        if console.json:
            console.document({"model": model, "messages": talk.messages})
        return DONE


class Conversation:
    """The messages so far. One that failed is taken back, so that the next can be sent."""

    def __init__(self, client: Client, console: Console, params: dict[str, Any], *, system: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.verbose = False
        self.pictures: list[str] = []  # shown with the next message
        self._client = client
        self._console = console
        self._params = params
        self._system = system
        self.reset()

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.pictures.clear()
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def say(self, text: str) -> None:
        """Sends `text` with the pictures and shows the answer. Raises RpcError, DaemonUnreachable, Interrupted."""
        content, self.pictures = content_with(text, self.pictures), []
        asked = [*self.messages, {"role": "user", "content": content}]
        show = None if self._console.json else Shown(self._console)
        try:
            result = perform(
                self._client, "generate.chat", {**self._params, "messages": asked}, self._console, show=show
            )
        except Interrupted as interrupted:
            self._keep(asked, _partial(interrupted.data))
            raise
        self._keep(asked, result)
        if show is not None:
            self._console.end_line()
            show_end(self._console, result, verbose=self.verbose)

    def _keep(self, asked: list[dict[str, Any]], result: dict[str, Any]) -> None:
        if not result.get("text"):  # templates want the roles in turns, so a question without an answer is not kept
            return
        answer = {"role": "assistant", "content": result["text"]}
        if "reasoning" in result:  # with it, what the model has read of this turn is not read again in the next
            answer["reasoning"] = result["reasoning"]
        self.messages = [*asked, answer]


def _obey(talk: Conversation, line: str, console: Console, *, interactive: bool) -> bool:
    """Does what one line says. False when it was the last one."""
    word = line.strip()
    if word in ("/quit", "/exit"):
        return False
    if word == "/reset":
        talk.reset()
        console.note("the conversation is forgotten")
    elif word == "/help":
        console.aside(_HELP)
    elif word == "/image" or word.startswith("/image "):
        _show(talk, word.removeprefix("/image").strip(), console, interactive=interactive)
    elif word.startswith("/") and word[1:].isalpha():
        if not interactive:
            raise UsageError(f"no command {word}; /help lists them")
        console.error(f"no command {word}; /help lists them")
    elif word:
        _say(talk, line, console, interactive=interactive)
    return True


def _say(talk: Conversation, line: str, console: Console, *, interactive: bool) -> None:
    """One exchange. At a terminal neither a refusal nor Ctrl-C ends the session."""
    try:
        talk.say(line)
    except (RpcError, Interrupted) as error:
        if not interactive:
            raise
        console.end_line()
        if isinstance(error, RpcError):
            console.error(error.message)


def _show(talk: Conversation, file: str, console: Console, *, interactive: bool) -> None:
    """Keeps a picture for the next message. At a terminal a file that is none does not end the session."""
    try:
        if not file:
            raise UsageError("/image takes the path of a picture")
        talk.pictures.append(picture_url(file, "/image"))
    except UsageError as error:
        if not interactive:
            raise
        console.error(error.message)


def _partial(data: Any) -> dict[str, Any]:
    """What there was of a cancelled answer."""
    partial = data.get("partial") if isinstance(data, dict) else None
    return partial if isinstance(partial, dict) else {}


def _typed_lines(console: Console) -> Iterator[str]:
    """What is typed, with editing and a history that ends with the session. Ctrl-C clears the line, Ctrl-D ends."""
    import readline  # noqa: F401  # input() edits lines once it is loaded

    while True:
        try:
            yield input(_PROMPT)
        except KeyboardInterrupt:
            console.aside("\n")
        except EOFError:
            console.aside("\n")
            return


def _piped_lines() -> Iterator[str]:
    with open(0, "rb", closefd=False) as stdin:
        for line in stdin:
            yield decode(line, "the message").rstrip("\r\n")
