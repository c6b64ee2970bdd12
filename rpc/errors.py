"""Errors on the wire: one table of codes, and the error object that each failure becomes.

Stateless. The codes and kinds are PROTOCOL.md's; a test fails on any class of `engine.api` that has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from omlxd.engine.api import (
    Cancelled,
    ContextTooLong,
    EngineFailed,
    InvalidGrammar,
    InvalidParams,
    MemoryExceeded,
    ModelBusy,
    ModelLoadFailed,
    ModelNotFound,
    OmlxError,
    QueueFull,
    SessionExists,
    SessionNotFound,
    ShuttingDown,
    StorageFailed,
    Unsupported,
)

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INTERNAL_ERROR: Final = -32603

CODES: Final[dict[type[OmlxError], int]] = {
    InvalidParams: -32602,
    ModelNotFound: -32010,
    ModelLoadFailed: -32011,
    MemoryExceeded: -32012,
    QueueFull: -32013,
    ContextTooLong: -32014,
    InvalidGrammar: -32015,
    SessionNotFound: -32016,
    SessionExists: -32017,
    ShuttingDown: -32018,
    ModelBusy: -32019,
    EngineFailed: -32020,
    Unsupported: -32021,
    StorageFailed: -32022,
    Cancelled: -32800,
}


class ErrorBody(Struct, frozen=True):
    """JSON-RPC's error object. `data.kind` is always there and is what programs should look at."""

    code: int
    message: str
    data: Mapping[str, Any]


def code_for(failure: OmlxError) -> int:
    return next((CODES[c] for c in type(failure).__mro__ if c in CODES), INTERNAL_ERROR)


def of_failure(failure: OmlxError) -> ErrorBody:
    """What the client is told about `failure`; a cancelled generation's partial result is its method's to add."""
    return ErrorBody(code_for(failure), failure.message, {"kind": failure.kind, **failure.fields})


def of_cancelled(cancelled: Cancelled, partial: object) -> ErrorBody:
    """`partial` is the wire form of what there was by then, None where the request makes nothing in parts."""
    reason = {} if cancelled.reason is None else {"reason": cancelled.reason}
    data = {"kind": cancelled.kind, "partial": partial, **reason}
    return ErrorBody(CODES[Cancelled], cancelled.message, data)


def parse_error(reason: str) -> ErrorBody:
    return ErrorBody(PARSE_ERROR, f"not JSON: {reason}", {"kind": "parse_error"})


def invalid_request(reason: str) -> ErrorBody:
    return ErrorBody(INVALID_REQUEST, reason, {"kind": "invalid_request"})


def method_not_found(method: str, hint: str) -> ErrorBody:
    return ErrorBody(METHOD_NOT_FOUND, f"no method {method!r}; {hint}", {"kind": "method_not_found", "method": method})


def internal_error(report: str) -> ErrorBody:
    """`report` is the id under which the log has the traceback; nothing else about a bug leaves the daemon."""
    return ErrorBody(
        INTERNAL_ERROR, f"internal error; the daemon's log has it as {report}", {"kind": "internal", "id": report}
    )
