"""`omlxctl cache inspect`: the prefix tree drawn in lines, and the whole of it for programs. Main thread only.

A run of blocks that nothing else continues stays in one column; where prompts part, their branches are indented. So
what stands to the left of a fork is shared by everything to its right.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence

from omlxd.cli.context import Context
from omlxd.cli.generation import checked, model_argument
from omlxd.cli.tables import size, span
from omlxd.cli.work import perform

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Node = Mapping[str, Any]

_PREVIEW = 40  # characters


def inspect(context: Context, given: argparse.Namespace) -> None:
    """Runs `cache inspect`."""
    params: dict[str, Any] = {"model": model_argument(checked(given.words[0], "MODEL"))}
    if given.limit is not None:
        params["limit"] = given.limit
    if given.session is not None:
        params["session"] = checked(given.session, "--session")
    with context.connect_to_work() as client:
        nodes = perform(client, "cache.inspect", params, context.console, with_progress=False)["nodes"]
    if context.console.json:
        context.console.document({"nodes": nodes})
    elif nodes:
        context.console.line("\n".join(draw(nodes, time.time())))
    else:
        context.console.note("nothing is stored for this model")


def draw(nodes: Sequence[Node], now: float) -> Iterator[str]:
    """One line for each node, parents above their children. `now` is in Unix seconds."""
    keys = {node["key"] for node in nodes if not node["checkpoint"]}
    children: dict[str, list[Node]] = {}
    for node in nodes:
        parent = node["parent"] if node["parent"] in keys else ""
        children.setdefault(parent, []).append(node)
    yield from _branches(children, "", "", now)


def _branches(children: Mapping[str, Sequence[Node]], parent: str, indent: str, now: float) -> Iterator[str]:
    """Goes down without recursion where there is no fork: a long prompt is a chain of many blocks."""
    below = children.get(parent, ())
    while len(below) == 1:
        yield f"{indent}{_described(below[0], now)}"
        below = () if below[0]["checkpoint"] else children.get(below[0]["key"], ())
    for place, node in enumerate(sorted(below, key=lambda node: (node["start"] + node["tokens"], node["key"]))):
        is_last = place == len(below) - 1
        yield f"{indent}{'└─' if is_last else '├─'} {_described(node, now)}"
        if not node["checkpoint"]:
            yield from _branches(children, node["key"], f"{indent}{'   ' if is_last else '│  '}", now)


def _described(node: Node, now: float) -> str:
    start, stop = node["start"], node["start"] + node["tokens"]
    place = f"checkpoint at {stop}" if node["checkpoint"] else f"{start}-{stop}"
    tiers = "+".join(tier for tier in ("hot", "ssd") if node[tier])
    parts = [place, tiers, size(node["bytes"])]
    if node["last_used"] is not None:
        parts.append(f"used {span(now - node['last_used'])} ago")
    if node["pins"]:
        parts.append(f"held {node['pins']}x")
    if not node["checkpoint"] and node.get("text_preview"):
        parts.append(json.dumps(node["text_preview"][:_PREVIEW], ensure_ascii=False))
    return "  ".join(parts)
