"""`rpc.discover`: the OpenRPC document, made from the types that decode and encode the wire.

Stateless. OpenRPC has no word for notifications while a request runs, so those stand under `x-notifications`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import FieldInfo

from omlxd.rpc import errors
from omlxd.rpc.decoding import description
from omlxd.rpc.messages import SHAPES
from omlxd.rpc.wire import DeltaValue, EventValue, ProgressValue, encode

OPENRPC_VERSION: Final = "1.3.2"
_REF: Final = "#/components/schemas/{name}"
_NOTIFIED: Final = (DeltaValue, ProgressValue, EventValue)


@dataclass(frozen=True, slots=True)
class Described:
    """What the document says about one method."""

    name: str
    summary: str
    params: type[Struct]
    result: Any
    takes_time: bool


def document(version: str, methods: Sequence[Described]) -> Raw:
    """The encoded document; `version` is the daemon's."""
    results = [method.result for method in methods]
    taken = [_shown(field) for method in methods for field in msgspec.structs.fields(method.params)]
    schemas, components = msgspec.json.schema_components([*_NOTIFIED, *results, *taken], ref_template=_REF)
    notified, gives = schemas[: len(_NOTIFIED)], schemas[len(_NOTIFIED) :]
    content = {
        "openrpc": OPENRPC_VERSION,
        "info": {"title": "omlxd", "version": version, "license": {"name": "Apache-2.0"}},
        "methods": [_method(method, result) for method, result in zip(methods, gives, strict=False)],
        "components": {"schemas": components, "errors": error_objects()},
        "x-notifications": _notifications(*notified),
    }
    return Raw(encode(content))


def error_objects() -> dict[str, dict[str, Any]]:
    """OpenRPC's error objects by kind; `data` says when it comes."""
    return {
        failure.kind: {"code": code, "message": failure.kind, "data": inspect.getdoc(failure)}
        for failure, code in errors.CODES.items()
    }


def _method(method: Described, result: dict[str, Any]) -> dict[str, Any]:
    described = {
        "name": method.name,
        "summary": method.summary,
        "paramStructure": "by-name",
        "params": list(_params(method.params)),
        "result": {"name": "result", "schema": result},
        "errors": [{"$ref": f"#/components/errors/{kind}"} for kind in error_objects()],
        "x-takes-time": method.takes_time,
    }
    if not method.params.__struct_config__.forbid_unknown_fields:
        described["x-ignores-other-params"] = True
    return described


def _params(params: type[Struct]) -> Iterable[dict[str, Any]]:
    """Those that have to be given first."""
    fields = sorted(msgspec.structs.fields(params), key=lambda field: not field.required)
    schemas, _ = msgspec.json.schema_components([_shown(field) for field in fields], ref_template=_REF)
    for field, schema in zip(fields, schemas, strict=True):
        yield {"name": field.encode_name, "required": field.required, "schema": schema}


def _shown(field: FieldInfo) -> Any:
    """The type that a field is held to in the end: decoding leaves conversations as they came, and checks them then."""
    shape = SHAPES.get(field.encode_name)
    if shape is None:
        return field.type
    return Annotated[shape if field.required else shape | None, Meta(description=description(field.type))]


def _notifications(delta: dict[str, Any], progress: dict[str, Any], event: dict[str, Any]) -> list[dict[str, Any]]:
    token = {"name": "token", "required": True, "schema": {"type": ["string", "integer"]}}
    value = {"name": "value", "required": True, "schema": {"oneOf": [delta, progress]}}
    return [
        {
            "name": "$/progress",
            "summary": "Deltas and progress of a running request, always before its response.",
            "paramStructure": "by-name",
            "params": [token, value],
        },
        {
            "name": "event",
            "summary": "What events.subscribe asked for, with the topic's own fields, until the connection ends.",
            "paramStructure": "by-name",
            "params": [{"name": "params", "required": True, "schema": event}],
        },
    ]
