"""The commands about models: `models`, `pull`, `load`, `unload`. Main thread only."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from omlxd.cli.context import Context
from omlxd.cli.errors import DONE
from omlxd.cli.generation import absolute, checked, list_models, model_argument
from omlxd.cli.parser import Parser, finite
from omlxd.cli.tables import size, table
from omlxd.cli.work import perform

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Models:
    """The whole catalog, broken models with their reason."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument("--names", action="store_true", help="only the names, one per line")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        with context.connect_or_start() as client:
            entries = list_models(client)
        console = context.console
        if console.json:
            console.document([entry["name"] for entry in entries] if given.names else entries)
        elif given.names:
            console.write("".join(f"{entry['name']}\n" for entry in entries))
        elif entries:
            rows = [
                [entry["name"], entry["state"].lower(), entry["kind"], size(entry["size_bytes"]), remark(entry)]
                for entry in entries
            ]
            console.line(table(["NAME", "STATE", "KIND", "SIZE", "REMARK"], rows))
        else:
            console.note("no models yet; `omlxctl pull demo` fetches a small one")
        return DONE


class Pull:
    """Fetches a model, from wherever the source says."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument(
            "source", metavar="SOURCE", help="demo, a Hugging Face repository id, a local directory or a .gguf file"
        )
        parser.add_argument("--name", help="the name it gets (default: the source's)")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        source = checked(given.source, "SOURCE")
        params = {"source": absolute(source) if source.endswith(".gguf") else model_argument(source)}
        if given.name is not None:
            params["name"] = checked(given.name, "--name")
        return _change(context, "models.pull", params, "pulled {name} ({size})")


class Load:
    """Loads a model ahead of its first request, or with other options than that would."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument("model", metavar="MODEL")
        parser.add_argument("--pin", action="store_true", help="never unload it to make room")
        parser.add_argument("--ttl", type=finite, metavar="S", help="unload it after S idle seconds; 0: never")
        parser.add_argument("--kv-bits", type=int, metavar="N", help="quantise the KV cache to N bits (not there yet)")
        parser.add_argument("--adapter", metavar="DIR", help="a LoRA adapter's directory")
        parser.add_argument("--draft", metavar="MODEL", help="a small model that drafts for it (not there yet)")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        params: dict[str, Any] = {"model": model_argument(checked(given.model, "MODEL"))}
        if given.pin:
            params["pin"] = True
        if given.ttl is not None:
            params["ttl_s"] = given.ttl
        if given.kv_bits is not None:
            params["kv_bits"] = given.kv_bits
        if given.adapter is not None:
            params["adapter"] = absolute(checked(given.adapter, "--adapter"))
        if given.draft is not None:
            params["draft"] = model_argument(checked(given.draft, "--draft"))
        return _change(context, "models.load", params, "loaded {name} ({size})")


class Unload:
    """Takes a model out of memory, when its requests are done or at once. Starts no daemon: nothing is loaded then."""

    def arguments(self, parser: Parser) -> None:
        parser.add_argument("model", metavar="MODEL")
        parser.add_argument("--now", action="store_true", help="end its running requests instead of waiting for them")

    def run(self, context: Context, given: argparse.Namespace) -> int:
        params: dict[str, Any] = {"model": model_argument(checked(given.model, "MODEL"))}
        if given.now:
            params["now"] = True
        with context.connect() as client:
            result = perform(client, "models.unload", params, context.console, with_progress=False)
        if context.console.json:
            context.console.document(result)
        else:
            context.console.line(f"unloaded {result['name']}, {size(result['freed_bytes'])} freed")
        return DONE


def remark(entry: Mapping[str, Any]) -> str:
    """What else there is to say about a model: why it cannot be used, what is special, that it is pinned."""
    parts = [entry.get("error"), entry.get("note"), "pinned" if entry["pinned"] else None]
    return " ".join("; ".join(part for part in parts if part).split())


def _change(context: Context, method: str, params: Mapping[str, Any], done: str) -> int:
    with context.connect_to_work() as client:
        entry = perform(client, method, params, context.console)
    if context.console.json:
        context.console.document(entry)
    else:
        context.console.line(done.format(name=entry["name"], size=size(entry["size_bytes"])))
    return DONE
