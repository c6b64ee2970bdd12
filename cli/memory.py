"""`omlxctl memory [set]`: who holds memory, what limits it, what was done about it, and another limit.

Main thread only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

from omlxd.cli.context import ANSWER_WITHIN_S, Context
from omlxd.cli.errors import DONE, UsageError
from omlxd.cli.parser import Parser
from omlxd.cli.tables import size, span, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TIERS = ("safe", "balanced", "aggressive")
_ACTIONS_SHOWN = 10


class Memory:
    """The memory guard in one reading; `set` gives it another tier or limit until the daemon ends."""

    def arguments(self, parser: Parser) -> None:
        parser.usage = "omlxctl memory [set TIER|SIZE] [options]"
        parser.add_argument("action", nargs="?", choices=["set"], help="change the limit of the running daemon")
        parser.add_argument("limit", nargs="?", metavar="TIER|SIZE", help=f"{', '.join(TIERS)}, or such as 20GB")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        if (given.action is None) != (given.limit is None):
            raise UsageError("memory set takes a tier or a size, as in `omlxctl memory set 20GB`")
        method, params = ("memory.status", {}) if given.action is None else ("memory.set", _wanted(given.limit))
        with context.connect() as client:
            status = client.call(method, params, timeout_s=ANSWER_WITHIN_S)
        if context.console.json:
            context.console.document(status)
        else:
            context.console.line("\n".join(_lines(status)))
        return DONE


def _wanted(limit: str) -> Mapping[str, Any]:
    if limit in TIERS:
        return {"tier": limit}
    from omlxd.daemon import settings

    try:
        # As the setting would be read: the same units and the same smallest limit.
        wanted = settings.load("", {"OMLXD_MEMORY__LIMIT_BYTES": limit}).memory.limit_bytes
    except settings.ConfigError as error:
        reason = str(error).partition("memory.limit_bytes ")[2]
        raise UsageError(f"{limit!r} is neither a tier ({', '.join(TIERS)}) nor a limit: {reason}") from error
    return {"limit_bytes": wanted}


def _lines(status: Mapping[str, Any]) -> list[str]:
    marks, ceilings = status["limits"], status["ceilings"]
    metal = "" if ceilings["metal"] is None else f", metal {size(ceilings['metal'])}"
    lines = [
        f"used       {size(status['footprint_bytes'])}, {size(status['pool_bytes'])} of it kept by MLX for reuse",
        f"named      {size(status['ledger_bytes'])}, {_signed(status['difference_bytes'])} is in no entry",
        f"level      {status['level'].lower()}; admits up to {size(marks['soft'])}, presses from {size(marks['hard'])}",
        f"ceilings   static {size(ceilings['static'])} ({status['tier']}), dynamic {size(ceilings['dynamic'])}{metal}; "
        f"{status['binding']} binds",
        "",
        table(
            ["HOLDER", "KIND", "BYTES"],
            [[entry["owner"], entry["kind"], size(entry["bytes"])] for entry in status["entries"]],
        ),
    ]
    actions = status["actions"][-_ACTIONS_SHOWN:]
    if actions:
        rows = [[span(time.time() - action["at"]) + " ago", action["what"], action["why"]] for action in actions]
        lines += ["", table(["WHEN", "WHAT", "WHY"], rows)]
    return lines


def _signed(nbytes: int) -> str:
    return size(nbytes) if nbytes >= 0 else f"-{size(-nbytes)}"
