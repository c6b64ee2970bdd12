"""`omlxctl config show|get|set|path`: the settings as the daemon would read them. Needs no daemon. Main thread only."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from omlxd.cli.context import Context
from omlxd.cli.errors import DONE, CliError, UsageError
from omlxd.cli.parser import Parser
from omlxd.cli.tables import table
from omlxd.daemon import settings
from omlxd.daemon.settings import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ARGUMENTS = {"show": 0, "get": 1, "set": 2, "path": 0}


class Config:
    """Every key with its value and where that comes from; changing one keeps the file's comments."""

    def arguments(self, parser: Parser) -> None:
        parser.usage = "omlxctl config show | get KEY | set KEY VALUE | path [options]"
        parser.add_argument(
            "action", choices=list(_ARGUMENTS), help="show all, get or set one, or print the file's path"
        )
        parser.add_argument("words", nargs="*", default=[], metavar="KEY [VALUE]", help="a key such as models.default")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        if len(given.words) != _ARGUMENTS[given.action]:
            raise UsageError(f"config {given.action} takes {_ARGUMENTS[given.action]} words, not {len(given.words)}")
        actions: dict[str, Callable[..., None]] = {"show": _show, "get": _get, "set": _set, "path": _path}
        try:
            actions[given.action](context, *given.words)
        except ConfigError as error:
            raise CliError(str(error), data={"kind": "config", "key": error.key}) from error
        return DONE


def _show(context: Context) -> None:
    readings = settings.readings(context.paths.config, context.env)
    if context.console.json:
        context.console.document({one.key: {"value": one.value, "source": one.source} for one in readings})
    else:
        rows = [[one.key, _shown(one.value), one.source] for one in readings]
        context.console.line(table(["KEY", "VALUE", "SOURCE"], rows))


def _get(context: Context, key: str) -> None:
    readings = {one.key: one for one in settings.readings(context.paths.config, context.env)}
    if key not in readings:
        raise UsageError(f"no setting {key!r}{_nearest(key, list(readings))}")
    value = readings[key].value
    if context.console.json:
        context.console.document(value)
    else:
        context.console.line(_shown(value))


def _set(context: Context, key: str, text: str) -> None:
    from omlxd.daemon import settings_file  # loads a TOML writer, which only this needs

    try:
        settings.check(key, text, where="config set")
    except ConfigError as error:
        raise UsageError(str(error), data={"kind": "config", "key": error.key}) from error
    try:
        settings_file.set_key(context.paths.config, key, text)
    except OSError as error:
        raise CliError(f"cannot write {context.paths.config}: {error.strerror}") from error
    reading = next(one for one in settings.readings(context.paths.config, context.env) if one.key == key)
    if context.console.json:
        context.console.document({"key": key, "value": reading.value, "source": reading.source})
    elif reading.source == "env":
        context.console.note(f"written; but the environment sets {key} to {_shown(reading.value)}, and that wins")
    else:
        context.console.note(
            "written; a daemon that runs takes it up at its next start, some keys with `omlxctl rpc daemon.reload`"
        )


def _path(context: Context) -> None:
    if context.console.json:
        context.console.document({"path": context.paths.config})
    else:
        context.console.line(context.paths.config)


def _shown(value: Any) -> str:
    """A value as `config set` takes it; one that is not set is an empty text."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _nearest(key: str, keys: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.3)
    return f"; did you mean {near[0]}?" if near else "; `omlxctl config show` lists them"
