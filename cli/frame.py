"""What `omlxctl top` shows: one reading of the daemon, and the one before it for rates, as lines that fit a terminal.

Pure functions. A line is its text and how it looks, which a terminal may leave out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omlxd.cli.disk_line import disk_line
from omlxd.cli.tables import size, span, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Status = Mapping[str, Any]

PLAIN, STRONG, FAINT, GOOD, WARN, ALARM = "plain", "strong", "faint", "good", "warn", "alarm"
Line = tuple[str, str]

_EMPTY: Line = ("", PLAIN)
_IN_MEMORY = ("LOADING", "READY", "BUSY", "DRAINING", "UNLOADING")
_LEVELS = {"OK": GOOD, "SOFT": WARN, "HARD": ALARM}
_INDENT = 8 * " "
_BAR = 30
# Holders as people would ask for them: what is a request's stands together.
_KINDS = {
    "process": "process",
    "weights": "weights",
    "load": "loading",
    "kv": "requests",
    "padding": "requests",
    "chunk": "requests",
    "pictures": "pictures",
    "hot": "stored prefixes",
    "writing": "to be written",
    "unreturned": "not returned",
}


def frame(now: Status, before: Status | None, *, at: float, columns: int, rows: int) -> list[Line]:
    """At most `rows` lines of at most `columns` characters; requests are left out first, and counted.

    `at` is the time of the reading, in Unix seconds.
    """
    models = _models(now, before, at)
    head = [*_head(now), _EMPTY, *_memory(now["memory"]), *_cache(now["cache"]), _EMPTY, *models]
    room = max(0, rows - len(head) - 1)
    lines = [*head, _EMPTY, *_requests(now, before, room - 1)]
    return [(text[:columns], look) for text, look in lines[:rows]]


def _head(now: Status) -> list[Line]:
    info, counts = now["info"], now["counts"]
    done = ", ".join(f"{count} {name}" for name, count in counts.items() if name != "live")
    text = f"omlxd {info['version']}  up {span(info['uptime_s'])}  {counts.get('live', 0)} live  {done}".rstrip()
    return [(text, STRONG)]


def _memory(memory: Mapping[str, Any]) -> list[Line]:
    if "limits" not in memory:
        return [(f"memory  {size(memory['footprint_bytes'])}", PLAIN)]
    limit = min(value for value in memory["ceilings"].values() if value is not None)
    used = max(memory["ledger_bytes"], memory["footprint_bytes"] - memory["pool_bytes"])
    state = f"{size(used)} of {size(limit)}, {memory['binding']} binds, {memory['level'].lower()}"
    marks = [memory["limits"][name] for name in ("soft", "hard")]
    lines = [(f"memory  {bar(used, limit, marks)} {state}", _LEVELS[memory["level"]])]
    lines.append((_INDENT + _ceilings(memory), FAINT))
    lines.append((_INDENT + _holders(memory), FAINT))
    if memory["level"] != "OK":
        lines += [(_INDENT + action["what"], WARN) for action in memory["actions"][-1:]]
    return lines


def _ceilings(memory: Mapping[str, Any]) -> str:
    ceilings = ", ".join(f"{name} {size(value)}" for name, value in memory["ceilings"].items() if value is not None)
    return f"admits up to {size(memory['limits']['soft'])}, presses from {size(memory['limits']['hard'])}; {ceilings}"


def _holders(memory: Mapping[str, Any]) -> str:
    """Who has it, largest first, and what nobody has named."""
    sums: dict[str, int] = {}
    for entry in memory["entries"]:
        name = _KINDS.get(entry["kind"], entry["kind"])
        sums[name] = sums.get(name, 0) + entry["bytes"]
    parts = [f"{name} {size(held)}" for name, held in sorted(sums.items(), key=lambda item: -item[1])]
    unnamed = [f"no entry {size(memory['difference_bytes'])}"] if memory["difference_bytes"] > 0 else []
    pool = [f"free in MLX's pool {size(memory['pool_bytes'])}"] if memory["pool_bytes"] else []
    return ", ".join(parts + unnamed + pool)


def _cache(cache: Mapping[str, Any]) -> list[Line]:
    if not cache.get("enabled"):
        return []
    lines = []
    hot, most = cache["bytes"]["hot"], cache["max_bytes"]["hot"]
    if most:
        lines.append((f"hot     {bar(hot, most)} {size(hot)} of {size(most)}{_reuse(cache)}", PLAIN))
    disk = disk_line(cache)
    if disk is not None and cache["max_bytes"]["ssd"]:
        look = WARN if cache["ssd"]["degraded"] else PLAIN
        lines.append((f"ssd     {bar(cache['bytes']['ssd'], cache['max_bytes']['ssd'])} {disk}", look))
    return lines


def _reuse(cache: Mapping[str, Any]) -> str:
    asked = cache.get("prompt_tokens", 0)
    return f"; {100 * cache['cached_tokens'] // asked} % of {asked} prompt tokens came from the cache" if asked else ""


def bar(used: float, most: float, marks: Sequence[float] = ()) -> str:
    """`[####...|.]`, with a stroke at each mark that is not reached yet; full when there is nothing to fill."""
    filled = _BAR if most <= 0 else min(_BAR, max(0, round(_BAR * used / most)))
    cells = ["#"] * filled + ["."] * (_BAR - filled)
    for mark in marks:
        at = min(_BAR - 1, int(_BAR * mark / most)) if most > 0 else 0
        if at >= filled:
            cells[at] = "|"
    return "[" + "".join(cells) + "]"


def _models(now: Status, before: Status | None, at: float) -> list[Line]:
    models = [model for model in now["models"] if model["state"] in _IN_MEMORY]
    if not models:
        return [("no model is in memory", FAINT)]
    rows = [
        [
            model["name"],
            model["state"].lower() + (", pinned" if model["pinned"] else ""),
            size(_held(model, now["memory"])),
            str(model["requests"]),
            _sum_of_rates(model["name"], now, before),
            _idle(model, at),
        ]
        for model in models
    ]
    return _headed(table(["MODEL", "STATE", "MEMORY", "REQUESTS", "TOKENS/S", "IDLE"], rows).splitlines())


def _headed(lines: Sequence[str]) -> list[Line]:
    return [(lines[0], FAINT), *((line, PLAIN) for line in lines[1:])]


def _held(model: Mapping[str, Any], memory: Mapping[str, Any]) -> int:
    """What the model and its requests have in the ledger; its size where there is none."""
    held = sum(entry["bytes"] for entry in memory.get("entries", ()) if entry["owner"] == model["name"])
    return held or int(model["size_bytes"])


def _idle(model: Mapping[str, Any], at: float) -> str:
    """Since when nobody has used it; of those that go by themselves, after how long they will."""
    if model["requests"] or model["last_used"] is None:
        return "-"
    since = span(at - model["last_used"])
    return since if model["ttl_s"] is None or model["pinned"] else f"{since} of {span(model['ttl_s'])}"


def _requests(now: Status, before: Status | None, room: int) -> list[Line]:
    requests: Sequence[Mapping[str, Any]] = now["requests"]
    if not requests:
        return [("no request", FAINT)]
    shown = requests[: max(0, room - 1)] if len(requests) > room else requests
    rows = [
        [
            request["id"],
            request["model"],
            request["state"].lower(),
            f"{request['computed_tokens']}/{request['prompt_tokens']}",
            str(request["completion_tokens"]),
            _shown(_rate(request, now, before)),
            span(request["age_s"]),
            " ".join(each for each in (_priority(request), request.get("reason") or "") if each),
        ]
        for request in shown
    ]
    head = ["REQUEST", "MODEL", "STATE", "PROMPT", "ANSWER", "TOKENS/S", "AGE", "REASON"]
    lines = _headed(table(head, rows).splitlines())
    hidden = len(requests) - len(shown)
    return [*lines, (f"and {hidden} more", FAINT)] if hidden else lines


def _priority(request: Mapping[str, Any]) -> str:
    return "(batch)" if request.get("priority") == "batch" else ""


def _sum_of_rates(model: str, now: Status, before: Status | None) -> str:
    rates = [_rate(request, now, before) for request in now["requests"] if request["model"] == model]
    known = [rate for rate in rates if rate is not None]
    return _shown(sum(known) if known else None)


def _shown(rate: float | None) -> str:
    return f"{rate:.0f}" if rate else "-"


def _rate(request: Mapping[str, Any], now: Status, before: Status | None) -> float | None:
    """Tokens per second since the reading before, of the prompt and of the answer together."""
    earlier = {each["id"]: each for each in before["requests"]}.get(request["id"]) if before is not None else None
    if before is None or earlier is None:
        return None
    seconds = now["info"]["uptime_s"] - before["info"]["uptime_s"]
    tokens = _tokens(request) - _tokens(earlier)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def _tokens(request: Mapping[str, Any]) -> int:
    return int(request["computed_tokens"]) + int(request["completion_tokens"])
