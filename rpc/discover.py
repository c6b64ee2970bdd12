"""`rpc.discover`: the OpenRPC document, made from the types that decode and encode the wire.

Stateless. OpenRPC has no word for notifications while a request runs, so those stand under `x-notifications`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from omlxd.rpc import errors
from omlxd.rpc.wire import DeltaValue, ProgressValue, encode

OPENRPC_VERSION: Final = "1.3.2"
_REF: Final = "#/components/schemas/{name}"


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
    kinds = [kind for method in methods for kind in (method.params, method.result)]
    schemas, components = msgspec.json.schema_components([*kinds, DeltaValue, ProgressValue], ref_template=_REF)
    results = dict(zip([method.name for method in methods], schemas[1::2], strict=False))
    content = {
        "openrpc": OPENRPC_VERSION,
        "info": {"title": "omlxd", "version": version, "license": {"name": "Apache-2.0"}},
        "methods": [_method(method, results[method.name]) for method in methods],
        "components": {"schemas": components, "errors": _errors()},
        "x-notifications": _notifications(schemas[-2], schemas[-1]),
    }
    return Raw(encode(content))


def _method(method: Described, result: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": method.name,
        "summary": method.summary,
        "paramStructure": "by-name",
        "params": list(_params(method.params)),
        "result": {"name": "result", "schema": result},
        "errors": [{"$ref": f"#/components/errors/{kind}"} for kind in _errors()],
        "x-takes-time": method.takes_time,
    }


def _params(params: type[Struct]) -> Iterable[dict[str, Any]]:
    fields = msgspec.structs.fields(params)
    schemas, _ = msgspec.json.schema_components([field.type for field in fields], ref_template=_REF)
    for field, schema in zip(fields, schemas, strict=True):
        yield {"name": field.encode_name, "required": field.required, "schema": schema}


def _errors() -> dict[str, dict[str, Any]]:
    return {failure.kind: {"code": code, "message": failure.kind} for failure, code in errors.CODES.items()}


def _notifications(delta: dict[str, Any], progress: dict[str, Any]) -> list[dict[str, Any]]:
    token = {"name": "token", "required": True, "schema": {"type": ["string", "integer"]}}
    value = {"name": "value", "required": True, "schema": {"oneOf": [delta, progress]}}
    return [
        {
            "name": "$/progress",
            "summary": "Deltas and progress of a running request, always before its response.",
            "paramStructure": "by-name",
            "params": [token, value],
        }
    ]
