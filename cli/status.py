"""The commands that look at a running daemon: `ps` and `status`. They start none. Main thread only."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

from omlxd import __version__
from omlxd.cli.catalog import remark
from omlxd.cli.context import ANSWER_WITHIN_S, PROTOCOL, Context
from omlxd.cli.disk_line import disk_line
from omlxd.cli.errors import DONE
from omlxd.cli.parser import Parser
from omlxd.cli.tables import size, span, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NOT_IN_MEMORY = {"ABSENT", "FAILED"}


class Ps:
    """Models in memory, and the requests that run or wait."""

    def arguments(self, parser: Parser) -> None:
        pass

    def run(self, context: Context, given: argparse.Namespace) -> int:
        status = _read(context)
        models = _in_memory(status)
        console = context.console
        if console.json:
            console.document({"models": models, "requests": status["requests"]})
            return DONE
        if models:
            console.line(_models_table(models))
        else:
            console.note("no model is in memory")
        if status["requests"]:
            console.line("\n" + _requests_table(status["requests"]))
        return DONE


class Status:
    """Who answers, and how it is doing."""

    def arguments(self, parser: Parser) -> None:
        pass

    def run(self, context: Context, given: argparse.Namespace) -> int:
        status = _read(context)
        console = context.console
        if console.json:
            console.document({**status, "client": {"version": __version__, "protocol": PROTOCOL}})
            return DONE
        facts = _facts(status)
        width = max(len(name) for name, _ in facts)
        for name, value in facts:
            console.line(f"{name:<{width}}  {value}")
        models = _in_memory(status)
        if models:
            console.line("\n" + _models_table(models))
        if status["requests"]:
            console.line("\n" + _requests_table(status["requests"]))
        return DONE


def _read(context: Context) -> Any:
    with context.connect() as client:
        return client.call("daemon.status", timeout_s=ANSWER_WITHIN_S)


def _in_memory(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [model for model in status["models"] if model["state"] not in _NOT_IN_MEMORY]


def _facts(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    info = status["info"]
    facts = [
        ("daemon", f"omlxd {info['version']}, protocol {info['protocol']}, pid {info['pid']}"),
        ("client", f"omlxctl {__version__}, protocol {PROTOCOL}{_skew(info)}"),
        ("up", span(info["uptime_s"])),
        ("device", f"{info['device']}, {info['platform']}"),
        ("mlx", f"{info['mlx']}, mlx-lm {info['mlx_lm']}, mlx-vlm {info['mlx_vlm']}"),
        ("home", info["home"]),
        ("socket", info["socket"]),
        ("models", f"{len(_in_memory(status))} in memory"),
        ("requests", ", ".join(f"{count} {name}" for name, count in status["counts"].items()) or "none yet"),
        ("cache", _cache(status["cache"])),
    ]
    on_disk = disk_line(status["cache"]) if status["cache"].get("enabled") else None
    if on_disk is not None:
        facts.append(("on disk", on_disk))
    footprint = status["memory"].get("footprint_bytes")
    return facts if footprint is None else [*facts, ("memory", f"{size(footprint)} used")]


def _cache(cache: Mapping[str, Any]) -> str:
    if not cache.get("enabled"):
        return "off"
    held = f"{size(cache['bytes']['hot'])} of {size(cache['max_bytes']['hot'])} in memory"
    return f"{held}, {cache['cached_tokens']} of {cache['prompt_tokens']} prompt tokens reused"


def _skew(info: Mapping[str, Any]) -> str:
    if info["protocol"] != PROTOCOL:
        return "; they do not understand each other, so stop the daemon with `omlxctl shutdown`"
    return "" if info["version"] == __version__ else "; `omlxctl shutdown` lets the installed version start next time"


def _models_table(models: list[Mapping[str, Any]]) -> str:
    now = time.time()
    rows = [
        [
            model["name"],
            model["state"].lower(),
            size(model["size_bytes"]),
            str(model["requests"]),
            "-" if model.get("last_used") is None else span(now - model["last_used"]) + " ago",
            remark(model),
        ]
        for model in models
    ]
    return table(["MODEL", "STATE", "SIZE", "REQUESTS", "USED", "REMARK"], rows)


def _requests_table(requests: list[Mapping[str, Any]]) -> str:
    rows = [
        [
            request["id"],
            request["model"],
            request["state"].lower(),
            f"{request['computed_tokens']}/{request['prompt_tokens']}",
            str(request["completion_tokens"]),
            span(request["age_s"]),
            request.get("reason") or "",
        ]
        for request in requests
    ]
    return table(["REQUEST", "MODEL", "STATE", "PROMPT", "ANSWER", "AGE", "REASON"], rows)
