"""JSON-RPC as a client sees it, without a socket: requests become lines, and lines find the request they answer.

Owns the bytes of one connection that are not yet a message, and the requests that are not answered. Used by one client,
on its thread or event loop; does no input or output, so that the blocking client and the asyncio one share it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from omlxd.rpc.failures import ClientError, DaemonUnreachable, RpcError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Params = Mapping[str, Any] | Sequence[Any]
    OnNotification = Callable[[str, Any], None]

_TOKENS = ("partialResultToken", "workDoneToken")


class Pending:
    """One request: the values of its `$/progress` that nobody has taken, and its answer or why there will be none."""

    __slots__ = ("changed", "failure", "has_ended", "id", "result", "values")

    def __init__(self, id_: int) -> None:
        self.id = id_
        self.values: deque[Any] = deque()
        self.has_ended = False
        self.result: Any = None
        self.failure: ClientError | None = None
        self.changed: Callable[[], None] | None = None  # called on this client's thread after each change

    def outcome(self) -> Any:
        """The result of a request that has ended. Raises RpcError, DaemonUnreachable."""
        if self.failure is not None:
            raise self.failure
        return self.result

    def end(self, result: Any, failure: ClientError | None) -> None:
        self.has_ended, self.result, self.failure = True, result, failure
        self.tell()

    def tell(self) -> None:
        if self.changed is not None:
            self.changed()


class Exchange:
    """The requests of one connection. `on_notification` is given what belongs to none of them."""

    def __init__(self, path: str, on_notification: OnNotification | None) -> None:
        self._path = path
        self._on_notification = on_notification
        self._pending: dict[int, Pending] = {}
        self._tokens: dict[str | int, Pending] = {}
        self._next_id = 1
        self._received = bytearray()
        self._searched = 0  # no line ends before this place in _received

    def request(self, method: str, params: Params | None) -> tuple[Pending, bytes]:
        """A new request and the line that asks for it; its id and the tokens in `params` lead its progress to it."""
        pending = Pending(self._next_id)
        frame = line(method, params, pending.id)
        self._next_id += 1
        self._pending[pending.id] = self._tokens[pending.id] = pending
        if isinstance(params, Mapping):
            for token in map(params.get, _TOKENS):
                if isinstance(token, str | int):
                    self._tokens[token] = pending
        return pending, frame

    def feed(self, data: bytes) -> None:
        """Takes in what the daemon sent. Raises DaemonUnreachable when that is not JSON-RPC."""
        self._received += data
        while (end := self._received.find(b"\n", self._searched)) >= 0:
            text = bytes(self._received[:end])
            del self._received[: end + 1]
            self._searched = 0
            if text.strip():
                self._take(text)
        self._searched = len(self._received)

    def end(self, failure: ClientError) -> None:
        """No more will come: every request that waits fails with `failure`."""
        pending, self._pending, self._tokens = list(self._pending.values()), {}, {}
        for each in pending:
            each.end(None, failure)

    def _take(self, text: bytes) -> None:
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._nonsense(str(error)) from error
        match message:
            case {"method": "$/progress", "params": {"token": str() | int() as token, "value": value}}:
                self._take_progress(token, value, message)
            case {"method": str(method)}:
                self._tell(method, message.get("params"))
            case {"error": {"code": int(code), "message": str(words), **more}}:
                self._answer(message.get("id"), None, RpcError(code, words, more.get("data")))
            case {"result": result}:
                self._answer(message.get("id"), result, None)
            case _:
                raise self._nonsense("neither an answer nor a notification")

    def _nonsense(self, reason: str) -> DaemonUnreachable:
        return DaemonUnreachable(self._path, f"what answers there does not speak JSON-RPC ({reason})")

    def _take_progress(self, token: str | int, value: Any, message: dict[str, Any]) -> None:
        pending = self._tokens.get(token)
        if pending is None:
            self._tell("$/progress", message["params"])
            return
        pending.values.append(value)
        pending.tell()

    def _tell(self, method: str, params: Any) -> None:
        if self._on_notification is not None:
            self._on_notification(method, params)

    def _answer(self, id_: Any, result: Any, failure: RpcError | None) -> None:
        if id_ is None:  # it could not read which request this was, and each that waits would wait for ever
            found = list(self._pending.values())
        else:
            found = [self._pending[id_]] if isinstance(id_, int) and id_ in self._pending else []
        for pending in found:
            del self._pending[pending.id]
            self._tokens = {token: owner for token, owner in self._tokens.items() if owner is not pending}
            pending.end(result, failure)


def line(method: str, params: Params | None, id_: int | None = None) -> bytes:
    """A request, or without `id_` a notification, as it goes over the wire."""
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    if id_ is not None:
        message["id"] = id_
    if params is not None:
        message["params"] = params
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
