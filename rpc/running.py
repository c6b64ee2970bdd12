"""The calls of one connection that take time and have not been answered yet.

Owned by the connection, on the event loop. Bounded: when `max_in_flight` run, the next is refused, so that a client
that sends and never reads is told so instead of being stored.
"""

from __future__ import annotations

from typing import Final

from omlxd.engine.api import QueueFull
from omlxd.rpc.calls import Call
from omlxd.rpc.envelope import Key
from omlxd.rpc.errors import CODES, ErrorBody, invalid_request

RETRY_AFTER_MS: Final = 100


class Running:
    """Which calls run, found by id or token."""

    def __init__(self, max_in_flight: int) -> None:
        self._max = max_in_flight
        self._calls: set[Call] = set()

    def __contains__(self, call: object) -> bool:
        return call in self._calls

    def refusal(self, call: Call, *, takes_time: bool) -> ErrorBody | None:
        """Why `call` may not begin beside the others; None when it may."""
        if call.key is not None and any(other.key == call.key for other in self._calls):
            return invalid_request("a request of this id is still running on this connection; use another id")
        if not takes_time or len(self._calls) < self._max:
            return None
        message = (
            f"{self._max} requests of this connection are running, rpc.max_in_flight allows no more; "
            "wait for one of them or open another connection"
        )
        data = {"kind": QueueFull.kind, "depth": self._max, "retry_after_ms": RETRY_AFTER_MS}
        return ErrorBody(CODES[QueueFull], message, data)

    def add(self, call: Call) -> None:
        self._calls.add(call)

    def discard(self, call: Call) -> None:
        self._calls.discard(call)

    def cancel(self, *, key: Key | None, token: Key | None) -> bool:
        """Stops the calls of that id or token; says whether there was one."""
        found = [
            call
            for call in self._calls
            if (key is not None and call.key == key) or (token is not None and call.has_token(token))
        ]
        for call in found:
            call.cancel()
        return bool(found)

    def cancel_all(self) -> None:
        for call in list(self._calls):
            call.cancel()

    def abandon_all(self) -> None:
        for call in list(self._calls):
            call.abandon()
