"""`omlxctl`: reads the command line, runs one command, and turns whatever happens into an exit code.

Owns the table of commands and the meaning of errors. A command's module is imported only when it runs, and nothing here
loads mlx, asyncio or the engine: `omlxctl ping` costs little more than starting Python.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from omlxd import __version__
from omlxd.cli.console import Console, claim_standard_streams
from omlxd.cli.context import Context
from omlxd.cli.errors import DONE, PIPE_CLOSED, CliError, Interrupted, OutputClosed, Unreachable, UsageError
from omlxd.cli.parser import HelpRequested, Parser
from omlxd.rpc.client import DaemonUnreachable, NotRunning, RpcError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from omlxd.cli.command import Command

# name -> module of this room, class in it, summary
COMMANDS: dict[str, tuple[str, str, str]] = {
    "run": ("run", "Run", "ask a model one question and print its answer"),
    "chat": ("chat", "Chat", "talk with a model"),
    "complete": ("run", "Complete", "let a model continue a text, without a chat template"),
    "ps": ("status", "Ps", "models in memory and running requests"),
    "status": ("status", "Status", "the daemon in one reading"),
    "models": ("catalog", "Models", "all models that the daemon knows"),
    "pull": ("catalog", "Pull", "fetch a model"),
    "load": ("catalog", "Load", "load a model into memory"),
    "pin": ("pins", "Pin", "keep a model in memory, whatever else is wanted"),
    "unpin": ("pins", "Unpin", "let a model go when its memory is wanted"),
    "rm": ("pins", "Rm", "delete a model that was pulled"),
    "unload": ("catalog", "Unload", "take a model out of memory"),
    "tokenize": ("tokens", "Tokenize", "print the token ids of a text"),
    "cache": ("cache", "Cache", "what is kept of prompts, why one is not, keeping and dropping them"),
    "session": ("session", "Session", "names for conversations whose state is kept"),
    "memory": ("memory", "Memory", "who holds memory, and how much there may be"),
    "bench": ("bench", "Bench", "measure a model on this machine, through the daemon and with mlx-lm alone"),
    "top": ("top", "Top", "models, requests, memory and cache, live"),
    "ping": ("basic", "Ping", "ask whether a daemon answers"),
    "socket": ("basic", "Socket", "print the path of the daemon's socket"),
    "stdio": ("stdio", "Stdio", "connect standard input and output with the daemon's socket"),
    "rpc": ("rpc_call", "Rpc", "call any method"),
    "shutdown": ("basic", "Shutdown", "stop the daemon when its requests are done"),
    "service": ("service", "Service", "run the daemon as a service of macOS, and read its log"),
    "config": ("config", "Config", "show and change settings"),
    "doctor": ("doctor", "Doctor", "look for what is wrong and say what to do"),
    "completion": ("completion", "Completion", "print a shell's completion script"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `omlxctl` with `argv` (default: the process's) and returns the exit code."""
    claim_standard_streams()
    os.umask(0o077)  # os.makedirs leaves a home's upper folders to it: open ones would let others take the home's place
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    console = Console(json="--json" in flags, quiet="--quiet" in flags or "-q" in flags)
    try:
        return _dispatch(console, arguments)
    except OutputClosed:
        return PIPE_CLOSED
    except CliError as error:
        return _fail(console, error)
    except RpcError as error:
        return _fail(console, CliError(error.message, code=error.code, data=error.data))
    except NotRunning as error:
        return _fail(console, Unreachable(f"{error}; `omlxd` runs one in the foreground"))
    except DaemonUnreachable as error:
        return _fail(console, Unreachable(f"{error}; `omlxctl doctor` looks for the cause"))
    except KeyboardInterrupt:
        return _fail(console, Interrupted())


def command_parser(name: str) -> tuple[Command, Parser]:
    """The command of that name, which must be one of COMMANDS, and its parser."""
    from importlib import import_module

    module, class_name, summary = COMMANDS[name]
    command: Command = getattr(import_module(f"omlxd.cli.{module}"), class_name)()
    parser = Parser(name, summary[0].upper() + summary[1:] + ".")
    command.arguments(parser)
    parser.add_global_flags()
    return command, parser


def _dispatch(console: Console, arguments: list[str]) -> int:
    place = _command_place(arguments)
    if place is None:
        return _without_command(console, arguments)
    name = arguments.pop(place)
    if name not in COMMANDS:
        raise UsageError(f"no command {name!r}{_nearest(name)}")
    command, parser = command_parser(name)
    try:
        given = parser.read(arguments)
    except HelpRequested as help_:
        console.write(help_.text)
        return DONE
    if given.version:
        return _version(console)
    context = Context(console, os.environ, socket=given.socket, may_start=not given.no_start)
    return command.run(context, given)


def _command_place(arguments: Sequence[str]) -> int | None:
    """Where the command's name stands: the first word that is neither a flag nor the value of --socket."""
    place = 0
    while place < len(arguments):
        if not arguments[place].startswith("-"):
            return place
        place += 2 if arguments[place] == "--socket" else 1
    return None


def _without_command(console: Console, arguments: Sequence[str]) -> int:
    parser = Parser("", "A thin client of omlxd, the local inference daemon.", epilog=_command_list())
    parser.prog, parser.usage = "omlxctl", "omlxctl COMMAND [options]"
    parser.add_global_flags()
    try:
        given = parser.read(arguments)
    except HelpRequested as help_:
        console.write(help_.text)
        return DONE
    if given.version:
        return _version(console)
    raise UsageError("no command given; `omlxctl --help` lists them")


def _version(console: Console) -> int:
    if console.json:
        console.document({"version": __version__})
    else:
        console.line(f"omlxctl {__version__}")
    return DONE


def _command_list() -> str:
    lines = [f"  {name:<12}{summary}" for name, (_, _, summary) in COMMANDS.items()]
    return "\n".join(["commands:", *lines, "", "`omlxctl COMMAND --help` shows what a command takes."])


def _nearest(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"; did you mean {near[0]}?" if near else "; `omlxctl --help` lists them"


def _fail(console: Console, error: CliError) -> int:
    """Says what went wrong, as the console's mode wants it, and gives the exit code."""
    try:
        if console.json:
            console.document({"error": {"code": error.code, "message": error.message, "data": error.data}})
        else:
            console.end_line()
    except OutputClosed:
        return PIPE_CLOSED
    except CliError as unwritable:
        error = unwritable  # a full disk also has no room for the document; standard error can still say it
    console.error(error.message)
    for line in error.details:
        console.detail(line)
    return error.exit_code
