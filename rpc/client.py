"""A synchronous client of the daemon: one Unix socket, JSON-RPC 2.0 in lines.

Owns its socket and the requests running on it. For `omlxctl`, tests and scripts; used by one thread, needs no event
loop and imports only the light parts of the standard library, because every `omlxctl` command pays for its imports.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

TYPE_CHECKING = False  # typing itself costs more to import than this whole module
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    Params = Mapping[str, Any] | Sequence[Any]

_RETRY_AFTER_S = (0.05, 0.1, 0.15)
_CHUNK_BYTES = 1 << 18
_BUSY = (errno.ECONNREFUSED, errno.EAGAIN)


class ClientError(Exception):
    """The root of everything this module raises."""


class DaemonUnreachable(ClientError):
    """No daemon answers at this path: none is there, it is gone, it is silent, or it is not a daemon."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"no daemon answers at {path}: {reason}")
        self.path = path
        self.reason = reason


class NotRunning(DaemonUnreachable):
    """Nothing listens at the path, so a daemon could be started there."""


class ConnectionLost(DaemonUnreachable):
    """A daemon did answer, and then the connection ended under a running request."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.args = (f"lost the daemon at {path}: {reason}",)


class RpcError(ClientError):
    """The daemon's answer is an error. `data` has at least `kind` for the daemon's own codes."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class Call:
    """One running request. Iterating yields the `value` of each of its `$/progress`, and ends when it has ended."""

    def __init__(self, client: Client, request_id: int) -> None:
        self.id = request_id
        self._client = client
        self._values: deque[dict[str, Any]] = deque()
        self._answer: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            while self._values:
                yield self._values.popleft()
            if self._answer is not None:
                return
            self._client._read_message()

    def result(self, timeout_s: float | None = None) -> Any:
        """Waits for the answer. Raises RpcError for an error, DaemonUnreachable when none comes within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._answer is None:
            self._client._read_message(deadline)
        error = self._answer.get("error")
        if error is not None:
            raise RpcError(error["code"], error["message"], error.get("data"))
        return self._answer.get("result")

    def cancel(self) -> None:
        """Asks the daemon to stop; the answer, an RpcError -32800 as a rule, still comes. Harmless after the end."""
        if self._answer is None:
            self._client.notify("$/cancelRequest", {"id": self.id})


class Client:
    """A connection. Several calls may run at once; waiting for one collects what arrives for the others.

    `on_notification(method, params)` is given every notification that belongs to no call of this client.
    """

    def __init__(
        self, connected: socket.socket, path: str, *, on_notification: Callable[[str, Any], None] | None = None
    ) -> None:
        self._socket = connected
        self._path = path
        self._on_notification = on_notification
        self._calls: dict[int, Call] = {}
        self._tokens: dict[str | int, Call] = {}
        self._next_id = 1
        self._received = bytearray()
        self._searched = 0  # no line ends before this place in _received

    @classmethod
    def connect(cls, path: str, *, on_notification: Callable[[str, Any], None] | None = None) -> Client:
        """Connects to the socket at `path`. Raises DaemonUnreachable.

        A refusal is tried again for 300 ms: a busy daemon on macOS, whose backlog is full, refuses like a dead one.
        """
        return cls(connect_socket(path), path, on_notification=on_notification)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, which cancels what runs on it. Idempotent."""
        self._socket.close()

    def call(self, method: str, params: Params | None = None, *, timeout_s: float | None = None) -> Any:
        """Sends a request and waits for its result. Raises RpcError, DaemonUnreachable."""
        return self.start(method, params).result(timeout_s)

    def start(self, method: str, params: Params | None = None) -> Call:
        """Sends a request and returns at once; its own id and the tokens in `params` lead its progress to the call."""
        call = Call(self, self._next_id)
        self._next_id += 1
        self._calls[call.id] = call
        self._tokens[call.id] = call
        if isinstance(params, Mapping):
            for name in ("partialResultToken", "workDoneToken"):
                token = params.get(name)
                if isinstance(token, str | int):
                    self._tokens[token] = call
        self._send_and_read(_frame(method, params, call.id))
        return call

    def notify(self, method: str, params: Params | None = None) -> None:
        """Sends a notification; nothing comes back."""
        try:
            self._socket.sendall(_frame(method, params))
        except OSError as error:
            raise self._lost(error) from error

    def _send_and_read(self, frame: bytes) -> None:
        """Sends a frame and takes in what arrives meanwhile.

        A daemon that has many answers for us stops reading until we take some; only sending would wait for ever.
        """
        rest = memoryview(frame)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLOUT)
        while rest:
            events = poll.poll()[0][1]
            try:
                if events & ~select.POLLOUT:
                    self._receive()
                if events & select.POLLOUT:
                    rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._lost(error) from error

    def _read_message(self, deadline: float | None = None) -> None:
        """Waits for one message and hands it to its call. `deadline` is a time of the monotonic clock."""
        line = self._next_line(deadline)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DaemonUnreachable(self._path, f"what answers there does not speak JSON-RPC ({error})") from error
        if not isinstance(message, dict):
            raise DaemonUnreachable(self._path, "what answers there does not speak JSON-RPC")
        if "method" in message:
            self._take_notification(message["method"], message.get("params"))
        else:
            self._take_answer(message)

    def _next_line(self, deadline: float | None) -> bytes:
        while (end := self._received.find(b"\n", self._searched)) < 0:
            self._searched = len(self._received)
            if deadline is not None:
                self._wait_readable(deadline)
            try:
                self._receive()
            except OSError as error:
                raise self._lost(error) from error
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._searched = 0
        return line if line.strip() else self._next_line(deadline)

    def _wait_readable(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise DaemonUnreachable(self._path, "it took the connection but does not answer in time")

    def _receive(self) -> None:
        chunk = self._socket.recv(_CHUNK_BYTES)
        if not chunk:
            raise ConnectionLost(self._path, "it closed the connection")
        self._received += chunk

    def _take_notification(self, method: str, params: Any) -> None:
        if method == "$/progress" and isinstance(params, dict):
            call = self._tokens.get(params.get("token", ""))
            if call is not None:
                call._values.append(params["value"])
                return
        if self._on_notification is not None:
            self._on_notification(method, params)

    def _take_answer(self, message: dict[str, Any]) -> None:
        answered = message.get("id")
        if answered is None:  # it could not read which request this was, and each that waits would wait for ever
            calls = list(self._calls.values())
        else:
            calls = [self._calls[answered]] if answered in self._calls else []
        for call in calls:
            call._answer = message
            del self._calls[call.id]
            self._tokens = {token: owner for token, owner in self._tokens.items() if owner is not call}

    def _lost(self, error: OSError) -> ConnectionLost:
        return ConnectionLost(self._path, f"the connection broke ({error.strerror or error})")


def connect_socket(path: str) -> socket.socket:
    """A stream socket connected to `path`. Raises DaemonUnreachable, after 300 ms of trying if it was refused."""
    for delay_s in _RETRY_AFTER_S:
        try:
            return _connect_once(path)
        except OSError as error:
            if error.errno not in _BUSY:
                raise _unreachable(path, error) from error
        time.sleep(delay_s)
    try:
        return _connect_once(path)
    except OSError as error:
        raise _unreachable(path, error) from error


def _connect_once(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(0)  # with a full backlog a blocking connect waits for a daemon that may never accept
        connected.connect(path)
        connected.settimeout(None)
    except OSError:
        connected.close()
        raise
    return connected


def _unreachable(path: str, error: OSError) -> DaemonUnreachable:
    if error.errno == errno.ENOENT:
        return NotRunning(path, "there is no socket")
    if error.errno == errno.ECONNREFUSED:
        return NotRunning(path, "nobody listens on that socket")
    if error.errno == errno.EAGAIN:
        return DaemonUnreachable(path, "it has more connections waiting than it takes")
    return DaemonUnreachable(path, error.strerror or str(error))  # "AF_UNIX path too long" has no errno


def _frame(method: str, params: Params | None, request_id: int | None = None) -> bytes:
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
    if request_id is not None:
        message["id"] = request_id
    if params is not None:
        message["params"] = params
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
