"""What `run`, `complete` and `chat` share: the flags for generation parameters, which model is meant, how text is read.

Values and functions; main thread only.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from omlxd.cli.console import Console
from omlxd.cli.context import Context
from omlxd.cli.demands import add_demand_flags, demands
from omlxd.cli.errors import CliError, UsageError
from omlxd.cli.parser import Parser, finite
from omlxd.rpc.client import Client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Entry = Mapping[str, Any]

# flag -> type, metavar, help; the parameter's name is the flag's with underscores
_NUMBERS: dict[str, tuple[type[int] | Any, str, str]] = {
    "--max-tokens": (int, "N", "the longest answer, in tokens"),
    "--temperature": (finite, "T", "0 always takes the most likely token"),
    "--top-p": (finite, "P", "sample from the smallest set of tokens with this probability"),
    "--top-k": (int, "K", "sample from the K most likely tokens"),
    "--min-p": (finite, "P", "leave out tokens less likely than P times the most likely one"),
    "--repetition-penalty": (finite, "X", "make tokens that occurred less likely; 1 changes nothing"),
    "--presence-penalty": (finite, "X", "subtracted once from tokens that occurred"),
    "--frequency-penalty": (finite, "X", "subtracted per occurrence"),
    "--seed": (int, "N", "makes the answer reproducible"),
    "--logprobs": (int, "N", "log-probabilities of each token and of its N best alternatives"),
}
_STATES_IN_MEMORY = {"READY", "BUSY"}


def add_generation_flags(parser: Parser) -> None:
    """Declares the flags that `generation_params` reads."""
    for flag, (kind, metavar, help_) in _NUMBERS.items():
        parser.add_argument(flag, type=kind, metavar=metavar, help=help_)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before TEXT; may be repeated")
    parser.add_argument(
        "--stop-token-id", action="append", type=int, metavar="ID", help="end the answer at this token; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's own end, to --max-tokens")
    add_demand_flags(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="print token counts and rates after the answer")


def generation_params(given: argparse.Namespace) -> dict[str, Any]:
    """The parameters that were given; the daemon fills in the others and checks the ranges."""
    names = [flag[2:].replace("-", "_") for flag in _NUMBERS]
    found = {name: value for name in names if (value := vars(given)[name]) is not None}
    if given.stop:
        found["stop"] = given.stop
    if given.stop_token_id:
        found["stop_token_ids"] = given.stop_token_id
    if given.ignore_eos:
        found["ignore_eos"] = True
    return found | demands(given)


def model_argument(text: str) -> str:
    """A model as the daemon wants it. What looks like a path is made absolute: the daemon's directory is another."""
    return absolute(text) if _looks_like_path(text) else text


def absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def is_model(text: str, entries: Sequence[Entry]) -> bool:
    """Whether `text` names a model of `models.list`, or is the path of a directory that holds one."""
    if any(entry["name"] == text for entry in entries):
        return True
    return _looks_like_path(text) and os.path.isfile(os.path.join(absolute(text), "config.json"))


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~/"))


def default_model(context: Context, entries: Sequence[Entry]) -> str:
    """The model when none is named: the setting, else the only usable one, else the only one in memory.

    Raises UsageError naming the choices, CliError when there is no model at all.
    """
    chosen = context.settings().models.default
    if chosen is not None:
        return model_argument(chosen)
    usable = [str(entry["name"]) for entry in entries if entry["state"] != "FAILED" and not entry.get("error")]
    loaded = [str(entry["name"]) for entry in entries if entry["state"] in _STATES_IN_MEMORY]
    for names in (usable, loaded):
        if len(names) == 1:
            return names[0]
    if not usable:
        raise CliError("there is no model yet; `omlxctl pull demo` fetches a small one")
    raise UsageError(
        f"which model? name one, or set models.default; there are {', '.join(usable)}",
        data={"kind": UsageError.kind, "models": usable},
    )


def list_models(client: Client) -> list[Entry]:
    entries: list[Entry] = client.call("models.list")
    return entries


def read_stdin(what: str) -> str:
    """All of standard input as UTF-8. Raises UsageError when it is not, or is blank."""
    with open(0, "rb", closefd=False) as stdin:
        text = decode(stdin.read(), what)
    if not text.strip():
        raise UsageError(f"{what} from standard input is empty")
    return text


def decode(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not valid UTF-8 at byte {error.start}") from error


def checked(text: str, what: str) -> str:
    """An argument that JSON can carry. Bytes of the command line that were no text arrive as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not valid text at character {error.start}") from error
    return text


def show_end(console: Console, result: Mapping[str, Any], *, verbose: bool) -> None:
    """What follows an answer on standard error: that it was cut, and with --verbose its numbers."""
    usage, timings = result["usage"], result["timings"]
    if result["finish_reason"] == "length" and console.err_is_terminal:
        console.note(f"(cut after {usage['completion_tokens']} tokens; --max-tokens allows more)")
    for token in result.get("logprobs") or ():
        console.note(_logprob_line(token))
    if verbose:
        console.note(
            f"{usage['prompt_tokens']} prompt tokens ({usage['cached_tokens']} cached), "
            f"{usage['completion_tokens']} generated, {timings['tokens_per_s']:.1f} tokens/s, "
            f"first token after {timings['ttft_ms']:.0f} ms"
        )


def _logprob_line(token: Mapping[str, Any]) -> str:
    top = ", ".join(f"{other['text']!r} {other['logprob']:.3f}" for other in token.get("top", ()))
    return f"{token['logprob']:8.3f}  {token['text']!r}" + (f"  ({top})" if top else "")
