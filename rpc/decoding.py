"""From the JSON of `params` to a method's parameters, or to the refusal that names the field at fault.

Stateless. The fast path is one strict decode; only when that fails is each field looked at by itself, so that nothing
has to be read out of an error message.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from omlxd.engine.api import InvalidParams

P = TypeVar("P", bound=Struct)


def decode_params(params: type[P], text: Raw | None) -> P:
    """`text` as `params`. Absent, null, {} and [] are all no parameters. Raises InvalidParams."""
    try:
        given = _named(text)
        try:
            decoded: P = _decoder(params).decode(given)
        except msgspec.DecodeError as exc:
            raise _explained(params, given, exc) from None
    except RecursionError:
        raise InvalidParams("params", "is nested too deeply") from None
    return decoded


@cache
def _decoder(params: type[P]) -> msgspec.json.Decoder[P]:
    return msgspec.json.Decoder(params)


def _named(text: Raw | None) -> bytes | Raw:
    first = b"" if text is None else bytes(memoryview(text)[:1])
    if text is None or first == b"n":
        return b"{}"
    if first == b"{":
        return text
    if first == b"[" and not msgspec.json.decode(text, type=list[Raw]):
        return b"{}"
    raise InvalidParams("params", "parameters are named: an object, not a list or a single value")


def _explained(params: type[Struct], text: bytes | Raw, cause: Exception) -> InvalidParams:
    """Which field is at fault. Found by decoding field by field, so that no message has to be taken apart."""
    given = msgspec.json.decode(text, type=dict[str, Raw])
    fields = {field.encode_name: field for field in msgspec.structs.fields(params)}
    for name in given:
        if name not in fields:
            known = ", ".join(sorted(fields)) or "none"
            return InvalidParams(name, f"is not a parameter of this method; it takes {known}")
    for name, field in fields.items():
        if name not in given:
            if field.required:
                return InvalidParams(name, f"is missing; takes {description(field.type)}")
            continue
        try:
            msgspec.json.decode(given[name], type=field.type)
        except msgspec.DecodeError as exc:
            return InvalidParams(name, f"{exc}; takes {description(field.type)}")
    return InvalidParams("params", str(cause))


def description(kind: Any) -> str:
    """What a parameter of that type takes, in words."""
    meta: Meta = kind.__metadata__[-1]
    return meta.description or ""
