"""What `omlxctl top` shows: one reading of the daemon, and the one before it for rates, as lines that fit a terminal.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omlxd.cli.tables import size, span, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Status = Mapping[str, Any]

_IN_MEMORY = ("LOADING", "READY", "BUSY", "DRAINING", "UNLOADING")
_BAR = 30


def frame(now: Status, before: Status | None, *, columns: int, rows: int) -> list[str]:
    """At most `rows` lines of at most `columns` characters; requests are left out first, and counted."""
    head = [*_head(now), "", *_memory(now["memory"]), *_cache(now["cache"]), "", *_models(now)]
    room = max(0, rows - len(head) - 1)
    lines = [*head, "", *_requests(now, before, room - 1)]
    return [line[:columns] for line in lines[:rows]]


def _head(now: Status) -> list[str]:
    info, counts = now["info"], now["counts"]
    done = ", ".join(f"{count} {name}" for name, count in counts.items() if name != "live")
    return [f"omlxd {info['version']}  up {span(info['uptime_s'])}  {counts.get('live', 0)} live  {done}".rstrip()]


def _memory(memory: Mapping[str, Any]) -> list[str]:
    if "limits" not in memory:
        return [f"memory  {size(memory['footprint_bytes'])}"]
    limit = min(value for value in memory["ceilings"].values() if value is not None)
    used = max(memory["ledger_bytes"], memory["footprint_bytes"] - memory["pool_bytes"])
    state = f"{size(used)} of {size(limit)}, {memory['binding']} binds, {memory['level'].lower()}"
    last = [f"        {action['what']}" for action in memory["actions"][-1:]] if memory["level"] != "OK" else []
    return [f"memory  {bar(used, limit)} {state}", *last]


def _cache(cache: Mapping[str, Any]) -> list[str]:
    if not cache.get("enabled"):
        return []
    tiers = [(name, cache["bytes"][name], cache["max_bytes"][name]) for name in ("hot", "ssd")]
    return [f"{name:<7} {bar(used, most)} {size(used)} of {size(most)}" for name, used, most in tiers if most]


def bar(used: float, most: float) -> str:
    """`[####......]`; full when there is nothing to fill."""
    filled = _BAR if most <= 0 else min(_BAR, max(0, round(_BAR * used / most)))
    return "[" + "#" * filled + "." * (_BAR - filled) + "]"


def _models(now: Status) -> list[str]:
    models = [model for model in now["models"] if model["state"] in _IN_MEMORY]
    if not models:
        return ["no model is in memory"]
    rows = [
        [
            model["name"],
            model["state"].lower() + (" pinned" if model["pinned"] else ""),
            size(model["size_bytes"]),
            str(model["requests"]),
        ]
        for model in models
    ]
    return table(["MODEL", "STATE", "SIZE", "REQUESTS"], rows).splitlines()


def _requests(now: Status, before: Status | None, room: int) -> list[str]:
    requests: Sequence[Mapping[str, Any]] = now["requests"]
    if not requests:
        return ["no request"]
    shown = requests[: max(0, room - 1)] if len(requests) > room else requests
    rows = [
        [
            request["id"],
            request["model"],
            request["state"].lower(),
            f"{request['computed_tokens']}/{request['prompt_tokens']}",
            str(request["completion_tokens"]),
            _rate(request, now, before),
            span(request["age_s"]),
            request.get("reason") or "",
        ]
        for request in shown
    ]
    lines = table(["REQUEST", "MODEL", "STATE", "PROMPT", "ANSWER", "TOKENS/S", "AGE", "REASON"], rows).splitlines()
    hidden = len(requests) - len(shown)
    return [*lines, f"and {hidden} more"] if hidden else lines


def _rate(request: Mapping[str, Any], now: Status, before: Status | None) -> str:
    """Tokens per second since the reading before, of the prompt and of the answer together."""
    earlier = {each["id"]: each for each in before["requests"]}.get(request["id"]) if before is not None else None
    if before is None or earlier is None:
        return "-"
    seconds = now["info"]["uptime_s"] - before["info"]["uptime_s"]
    tokens = _tokens(request) - _tokens(earlier)
    return f"{tokens / seconds:.0f}" if seconds > 0 and tokens > 0 else "-"


def _tokens(request: Mapping[str, Any]) -> int:
    return int(request["computed_tokens"]) + int(request["completion_tokens"])
