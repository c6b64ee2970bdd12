"""JSON-RPC's envelope: from a frame to its members, each a request or the reason why it is none.

Pure functions on bytes. Ids stay the JSON text they came as, so that they go back exactly; params stay undecoded until
their method is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw, Struct

from omlxd.rpc.errors import ErrorBody, invalid_request, parse_error

Key = str | int | float | bytes
NULL: Final = b"null"
_ABSENT: Final = Raw(b"")
# An id that stands before anything nested is the request's own, whatever follows it.
_LEADING_ID: Final = re.compile(
    rb'\s*\{(?:\s*"(?:jsonrpc|method)"\s*:\s*"[^"\\]*"\s*,)*'
    rb'\s*"id"\s*:\s*("[^"\\\x00-\x1f]*"|-?[0-9]{1,20})\s*[,}]'
)


@dataclass(frozen=True, slots=True)
class Request:
    """One member. `id` is its JSON text, None for a notification; `params` is undecoded, None where absent."""

    method: str
    params: Raw | None
    id: bytes | None


@dataclass(frozen=True, slots=True)
class Refused:
    """One member, or a whole frame, that is answered with an error at once."""

    error: ErrorBody
    id: bytes = NULL


Member = Request | Refused


@dataclass(frozen=True, slots=True)
class Members:
    """What one frame holds. A batch is answered by one array, anything else by one object."""

    members: list[Member]
    is_batch: bool = False


class _Envelope(Struct):
    jsonrpc: Raw = _ABSENT
    method: Raw = _ABSENT
    params: Raw = _ABSENT
    id: Raw = _ABSENT
    result: Raw = _ABSENT
    error: Raw = _ABSENT


# What JavaScript makes of a text that was cut inside an emoji; few would know it from a JSON parser's words.
_HALF_A_PAIR: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")

_decode = msgspec.json.Decoder(_Envelope).decode
_decode_batch = msgspec.json.Decoder(list[Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_decode_text = msgspec.json.Decoder(str).decode


def read_frame(frame: bytes) -> Members:
    """Never raises: what is no JSON, and what is no request, becomes the refusal that says so."""
    if not frame.isascii():
        try:
            frame.decode()
        except UnicodeDecodeError as exc:
            return Members([Refused(parse_error(f"invalid UTF-8 at byte {exc.start}"), leading_id(frame))])
    if frame.lstrip()[:1] != b"[":
        member = _read_member(frame)
        return Members([] if member is None else [member])
    return _read_batch(frame)


def leading_id(head: bytes) -> bytes:
    """The id of a request that cannot be read as a whole, where it stands in front; else null."""
    found = _LEADING_ID.match(head)
    return found.group(1) if found else NULL


def key_of(text: bytes) -> Key:
    """What an id or token is compared by. Numbers beyond what Python cares to convert are compared as text."""
    try:
        value = _decode_any(text)
    except msgspec.DecodeError:
        return text
    return value if isinstance(value, str | int | float) else text


def _read_batch(frame: bytes) -> Members:
    try:
        texts = _decode_batch(frame)
    except (msgspec.DecodeError, RecursionError) as exc:
        return Members([Refused(parse_error(_reason(exc, frame)))])
    if not texts:
        return Members([Refused(invalid_request("a batch has at least one member"))])
    members = [_read_member(text) for text in texts]
    return Members([member for member in members if member is not None], is_batch=True)


def _read_member(text: bytes | Raw) -> Member | None:
    """None for a response: this side asks nothing, and an answer to an answer would go on for ever."""
    try:
        envelope = _decode(text)
    except (msgspec.DecodeError, RecursionError) as exc:
        return _refuse_text(text, exc)
    id_ = bytes(envelope.id) or None
    if id_ is not None and id_[:1] not in b'"-0123456789n':
        return Refused(invalid_request("id is a string, a number or null"))
    answer_id = id_ or NULL
    if bytes(envelope.jsonrpc) != b'"2.0"':
        return Refused(invalid_request('jsonrpc is "2.0"'), answer_id)
    method = bytes(envelope.method)
    if not method and (bytes(envelope.result) or bytes(envelope.error)):
        return None
    if method[:1] != b'"':
        return Refused(invalid_request("method is a string"), answer_id)
    try:
        name = _decode_text(method)
    except msgspec.DecodeError as exc:
        return Refused(parse_error(str(exc)), answer_id)
    params = envelope.params if envelope.params != _ABSENT else None
    return Request(name, params, id_)


def _refuse_text(text: bytes | Raw, cause: Exception) -> Refused:
    """Tells a JSON text that is no object from one that is no JSON."""
    try:
        msgspec.json.decode(text, type=Raw)
    except (msgspec.DecodeError, RecursionError):
        return Refused(parse_error(_reason(cause, text)), leading_id(bytes(text)))
    return Refused(invalid_request(f"a request is an object: {cause}"))


def _reason(exc: Exception, text: bytes | Raw) -> str:
    if isinstance(exc, RecursionError):
        return "nested too deeply"
    half = _HALF_A_PAIR.search(text)
    return str(exc) if half is None else f"{exc}; byte {half.start()} begins an escape that is half of a surrogate pair"
