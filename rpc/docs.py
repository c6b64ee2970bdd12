"""`python -m omlxd.rpc.docs`: the tables of docs/protocol.md, made from the OpenRPC document.

Run by a developer whose change to the wire's types has made the page old; a test says so. What stands above the page's
mark is written by hand and left alone. Imported by nobody else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from omlxd.rpc.discover import document
from omlxd.rpc.methods import described
from omlxd.rpc.params import GenerateParams, Slow

MARK: Final = "<!-- What follows is made by `python -m omlxd.rpc.docs`; change the types instead. -->\n"
_LIMITS: Final = (
    ("minimum", "at least {}"), ("exclusiveMinimum", "over {}"), ("maximum", "at most {}"),
    ("minLength", "at least {} long"), ("minItems", "at least {} of them"), ("maxItems", "at most {} of them"),
)  # fmt: skip

Schema = Mapping[str, Any]


def page(hand_written: str) -> str:
    """The whole page: `hand_written` up to its mark, and the tables as the types are now."""
    head, mark, _ = hand_written.partition(MARK)
    if not mark:
        raise ValueError("the page has no mark, so nothing says where the tables begin")
    content = json.loads(bytes(document("", described())))
    return head + MARK + "\n" + "\n".join(_sections(content)) + "\n"


def _sections(content: Schema) -> Iterator[str]:
    yield "## Methods\n"
    yield from _methods(content["methods"])
    yield "\n## Types\n"
    yield from _types(content["components"]["schemas"])
    yield "\n## Notifications from the daemon\n"
    yield from _notifications(content["x-notifications"])
    yield "\n## Errors of its own\n"
    yield from _errors(content["components"]["errors"])


def _methods(methods: Sequence[Schema]) -> Iterator[str]:
    slow, generation = _names(Slow), _names(GenerateParams) - _names(Slow) - {"model"}
    shared: dict[str, Schema] = {}
    for method in methods:
        params = {param["name"]: param for param in method["params"]}
        shared |= params
        own = [name for name in params if name not in slow and not (generation <= params.keys() and name in generation)]
        also = ["[generation parameters](#generation-parameters)"] * (generation <= params.keys())
        also += ["[streaming parameters](#streaming-parameters)"] * (slow <= params.keys())
        yield f"### {method['name']}\n"
        yield f"{method['summary']} Gives {_kind(method['result']['schema'])}.\n"
        if method.get("x-ignores-other-params"):
            yield "Whatever parameters come are ignored.\n"
        if own:
            yield from _parameters(params[name] for name in own)
        if also:
            yield f"{'And' if own else 'Takes'} the {' and the '.join(also)}.\n"
    yield "### Generation parameters\n"
    yield "Null, or nothing, is the default.\n"
    yield from _parameters(shared[name] for name in shared if name in generation)
    yield "### Streaming parameters\n"
    yield from _parameters(shared[name] for name in shared if name in slow)


def _parameters(params: Iterable[Schema]) -> Iterator[str]:
    yield "| parameter | takes |"
    yield "|---|---|"
    for param in params:
        required = ", required" if param["required"] else ""
        yield f"| `{param['name']}`{required} | {_cell(param['schema'].get('description', ''))} |"
    yield ""


def _types(schemas: Mapping[str, Schema]) -> Iterator[str]:
    for name in sorted(schemas):
        schema = schemas[name]
        yield f"### {name}\n"
        if description := schema.get("description"):
            yield f"{description}\n"
        if properties := schema.get("properties"):
            required = schema.get("required", ())
            yield "| field | is |"
            yield "|---|---|"
            for field, kind in properties.items():
                yield f"| `{field}`{'' if field in required else ', may be left out'} | {_cell(_kind(kind))} |"
            yield ""


def _notifications(notifications: Sequence[Schema]) -> Iterator[str]:
    for notification in notifications:
        yield f"### {notification['name']}\n"
        yield f"{notification['summary']}\n"
        yield "| parameter | is |"
        yield "|---|---|"
        yield from (f"| `{param['name']}` | {_cell(_kind(param['schema']))} |" for param in notification["params"])
        yield ""


def _errors(errors: Mapping[str, Schema]) -> Iterator[str]:
    yield "| code | `data.kind` | when |"
    yield "|---|---|---|"
    for error in sorted(errors.values(), key=lambda error: -int(error["code"])):
        yield f"| {error['code']} | `{error['message']}` | {_cell(' '.join(error['data'].split()))} |"


def _kind(schema: Schema) -> str:
    """A schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/")[-1]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(_kind(each) for each in schema[several])
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum") or [schema["const"]])
    limits = [words.format(schema[limit]) for limit, words in _LIMITS if limit in schema]
    return ", ".join([_plain(schema), *limits])


def _plain(schema: Schema) -> str:
    match schema.get("type"):
        case "array":
            return f"a list of ({_kind(schema['items'])})" if schema.get("items") else "a list"
        case "object":
            values = schema.get("additionalProperties")
            return f"an object of {_kind(values)}" if isinstance(values, dict) and values else "an object"
        case list(several):
            return " or ".join(several)
        case str(name):
            return name
        case _:
            return "anything"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _names(params: type[Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(params)}


def main() -> None:
    """Rewrites the page that is named, by default docs/protocol.md of the current directory."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/protocol.md")
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
