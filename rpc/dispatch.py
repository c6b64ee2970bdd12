"""Dispatch: from a call to its answer's bytes, through jsonrpcserver, one request at a time.

Stateless but for the table. jsonrpcserver looks the method up and builds the response; what it would do with parameters
and with failures is done here, typed: its own error data would carry exception texts, and so paths, to the client.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from jsonrpcserver import Error, Success, async_dispatch
from msgspec import Raw

from omlxd.engine.api import Cancelled, OmlxError
from omlxd.rpc.calls import Call
from omlxd.rpc.decoding import decode_params
from omlxd.rpc.errors import ErrorBody, internal_error, method_not_found, of_cancelled, of_failure
from omlxd.rpc.methods import Method
from omlxd.rpc.wire import encode

log = logging.getLogger("omlxd.rpc")


class _Table(dict[str, Callable[[Call], Awaitable[Any]]]):
    """Name to function, as jsonrpcserver wants it; an unknown name has a function too, which says so."""

    def __missing__(self, name: str) -> Callable[[Call], Awaitable[Any]]:
        near = difflib.get_close_matches(name, self, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "rpc.discover lists what there is"

        async def unknown(call: Call) -> Any:
            return _error(method_not_found(name, hint))

        return unknown


class Dispatcher:
    """Answers calls from one table of methods."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._methods = methods
        self._table = _Table((name, _function(method)) for name, method in methods.items())

    def takes_time(self, name: str) -> bool:
        method = self._methods.get(name)
        return method is not None and method.takes_time

    async def answer(self, call: Call) -> bytes | None:
        """The response as JSON, None for a notification. Whatever goes wrong in a method is in the response."""
        answer = await async_dispatch(
            call,
            methods=self._table,
            context=call,
            deserializer=_as_request,
            validator=_is_checked,
            serializer=encode,
        )
        return answer or None


def response(id_: bytes, error: ErrorBody) -> bytes:
    """The answer to what never became a call."""
    return encode({"jsonrpc": "2.0", "error": error, "id": Raw(id_)})


def _function(method: Method) -> Callable[[Call], Awaitable[Any]]:
    async def answer(call: Call) -> Any:
        try:
            params = decode_params(method.params, call.params)
            call.params = None  # a long prompt need not be held twice
            result = await method.handler(call, params)
            return _error(result) if isinstance(result, ErrorBody) else Success(Raw(encode(result)))
        except Cancelled as cancelled:
            return _error(of_cancelled(cancelled, None))
        except OmlxError as failure:
            return _error(of_failure(failure))
        except Exception:  # a handler's bug is told by a number that stands in the log, and is this call's alone
            report = secrets.token_hex(4)
            log.exception("internal error %s in %s", report, method.name)
            return _error(internal_error(report))

    answer.__signature__ = inspect.signature(answer)  # type: ignore[attr-defined]  # jsonrpcserver asks for each call
    return answer


def _error(error: ErrorBody) -> Any:
    return Error(error.code, error.message, error.data)


def _as_request(call: Call) -> dict[str, Any]:
    """jsonrpcserver's form of a request that `envelope` has already checked."""
    request: dict[str, Any] = {"method": call.method}
    if call.id is not None:
        request["id"] = Raw(call.id)
    return request


def _is_checked(request: object) -> None:
    """Takes the place of jsonrpcserver's schema validation."""
