"""The Python client that blocks: `with connect() as omlx: for delta in omlx.chat(model, messages): ...`.

Owns its socket and the requests running on it. For programs, `omlxctl` and tests; used by one thread, needs no event
loop and imports only the light parts of the standard library, because every `omlxctl` command pays for its imports.
`rpc.aclient` is the same for asyncio; docs/python.md shows both.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from omlxd.rpc.address import socket_path
from omlxd.rpc.dial import connect_socket
from omlxd.rpc.exchange import Exchange, Pending, line
from omlxd.rpc.failures import (
    ClientClosed,
    ClientError,
    ConnectionLost,
    DaemonUnreachable,
    NotRunning,
    RpcError,
    lost,
)

TYPE_CHECKING = False  # typing itself costs more to import than this whole module
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Unpack

    from omlxd.rpc import shapes
    from omlxd.rpc.exchange import OnNotification, Params

__all__ = [
    "Answer",
    "Call",
    "Client",
    "ClientClosed",
    "ClientError",
    "ConnectionLost",
    "DaemonUnreachable",
    "NotRunning",
    "RpcError",
    "connect",
    "connect_socket",
]

_CHUNK_BYTES = 1 << 18


def connect(path: str | None = None, *, on_notification: OnNotification | None = None) -> Client:
    """A client of the daemon at `path`: $OMLXD_SOCKET, else omlxd.sock in $OMLXD_HOME, else in ~/.omlxd.

    Starts no daemon. Raises NotRunning where none listens, DaemonUnreachable where connecting fails otherwise.
    """
    return Client.connect(socket_path(os.environ) if path is None else path, on_notification=on_notification)


class Call:
    """One running request. Iterating yields the `value` of each of its `$/progress`, and ends when it has ended."""

    def __init__(self, client: Client, pending: Pending) -> None:
        self.id = pending.id
        self._client = client
        self._pending = pending

    @property
    def has_ended(self) -> bool:
        """Whether its answer has been read; it may have been sent before that."""
        return self._pending.has_ended

    def __iter__(self) -> Iterator[Any]:
        """Raises DaemonUnreachable. An error that the daemon answers is `result`'s to raise."""
        pending = self._pending
        while pending.values or not pending.has_ended:
            if pending.values:
                yield pending.values.popleft()
            else:
                self._client.read()
        if isinstance(pending.failure, DaemonUnreachable):
            raise pending.failure

    def result(self, timeout_s: float | None = None) -> Any:
        """Waits for the answer. Raises RpcError for an error, DaemonUnreachable when none comes within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._pending.has_ended:
            self._client.read(deadline)
        return self._pending.outcome()

    def cancel(self) -> None:
        """Asks the daemon to stop; the answer, an RpcError -32800 as a rule, still comes. Harmless after the end."""
        if self._pending.has_ended:
            return
        try:
            self._client.notify("$/cancelRequest", {"id": self.id})
        except ConnectionLost:
            return  # which has cancelled it; `result` says so


class Answer:
    """A generation under way. Iterating yields its deltas as they come; `result` is all of it.

    Leaving a `with` block that it was made in cancels it, if it has not ended. Raises what `Call` raises, from the loop
    too; an answer that was cancelled here just ends, and its result is what there was by then.
    """

    def __init__(self, call: Call, on_progress: shapes.OnProgress | None) -> None:
        self._call = call
        self._on_progress = on_progress
        self._is_cancelled = False

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[shapes.Delta]:
        for value in self._call:
            if value["kind"] == "delta":
                yield value
            elif self._on_progress is not None:
                self._on_progress(value)
        self.result()

    def result(self, timeout_s: float | None = None) -> shapes.Generated:
        """Waits for the end; deltas that were not taken stay to be iterated."""
        try:
            result: shapes.Generated = self._call.result(timeout_s)
        except RpcError as error:
            if self._is_cancelled and error.partial is not None:
                partial: shapes.Generated = error.partial
                return partial
            raise
        return result

    def cancel(self) -> None:
        """Asks the daemon to stop: it does within a token. Harmless after the end."""
        if not self._call.has_ended:
            self._is_cancelled = True
            self._call.cancel()


class Client:
    """A connection to the daemon. Several calls may run at once; waiting for one collects what arrives for the others.

    What runs when the connection ends fails with ConnectionLost, and is never sent again. The next request opens a new
    connection, or raises NotRunning. `on_notification(method, params)` is given what belongs to no call of this client.
    """

    def __init__(self, connected: socket.socket, path: str, *, on_notification: OnNotification | None = None) -> None:
        self._path = path
        self._on_notification = on_notification
        self._socket = connected
        self._exchange = Exchange(path, on_notification)
        self._is_connected = True
        self._is_closed = False

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
        self._is_closed = True
        self._end(ClientClosed())

    # Any method

    def call(self, method: str, params: Params | None = None, *, timeout_s: float | None = None) -> Any:
        """Sends a request and waits for its result. Raises RpcError, DaemonUnreachable."""
        return self.start(method, params).result(timeout_s)

    def start(self, method: str, params: Params | None = None) -> Call:
        """Sends a request and returns at once. Raises DaemonUnreachable."""
        self._connect_again_if_lost()
        pending, frame = self._exchange.request(method, params)
        self._send(frame, pending)
        return Call(self, pending)

    def notify(self, method: str, params: Params | None = None) -> None:
        """Sends a notification; nothing comes back."""
        if self._is_closed:
            raise ClientClosed
        try:
            self._socket.sendall(line(method, params))
        except OSError as error:
            raise lost(self._path, error) from error

    def read(self, deadline: float | None = None) -> None:
        """Waits for something to arrive, and hands it to its calls and to `on_notification`.

        `deadline` is a time of the monotonic clock. Raises DaemonUnreachable after it, ConnectionLost at the end.
        """
        if self._is_closed:
            raise ClientClosed
        if not self._is_connected:
            raise ConnectionLost(self._path, "it closed the connection")
        if deadline is not None:
            self._wait_readable(deadline)
        self._receive()

    # The methods by name: what they take and give is docs/protocol.md's

    def ping(self) -> str:
        pong: str = self.call("ping")
        return pong

    def info(self) -> shapes.DaemonInfo:
        info: shapes.DaemonInfo = self.call("daemon.info")
        return info

    def status(self) -> shapes.Status:
        status: shapes.Status = self.call("daemon.status")
        return status

    def shutdown(self, grace_s: float | None = None) -> None:
        """Returns when the daemon has begun to drain."""
        self.call("daemon.shutdown", {"grace_s": grace_s})

    def models(self) -> list[shapes.ModelLine]:
        models: list[shapes.ModelLine] = self.call("models.list")
        return models

    def load(
        self, model: str, *, on_progress: shapes.OnProgress | None = None, **options: Unpack[shapes.LoadOptions]
    ) -> shapes.ModelLine:
        entry: shapes.ModelLine = self._follow("models.load", {"model": model, **options}, on_progress)
        return entry

    def unload(self, model: str, *, now: bool = False) -> shapes.UnloadedLine:
        entry: shapes.UnloadedLine = self.call("models.unload", {"model": model, "now": now})
        return entry

    def pull(
        self, source: str, *, name: str | None = None, on_progress: shapes.OnProgress | None = None
    ) -> shapes.ModelLine:
        entry: shapes.ModelLine = self._follow("models.pull", {"source": source, "name": name}, on_progress)
        return entry

    def chat(
        self,
        model: str,
        messages: Sequence[shapes.Message],
        *,
        on_progress: shapes.OnProgress | None = None,
        **options: Unpack[shapes.ChatOptions],
    ) -> Answer:
        """Sends the request and returns its answer, which is then read."""
        params = {"model": model, "messages": messages, **options, "stream": True}
        return Answer(self.start("generate.chat", params), on_progress)

    def complete(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        on_progress: shapes.OnProgress | None = None,
        **options: Unpack[shapes.CompleteOptions],
    ) -> Answer:
        """Sends the request and returns its answer, which is then read."""
        params = {"model": model, "prompt": prompt, **options, "stream": True}
        return Answer(self.start("generate.complete", params), on_progress)

    def tokenize(self, model: str, text_or_messages: str | Sequence[shapes.Message]) -> shapes.Tokens:
        field = "text" if isinstance(text_or_messages, str) else "messages"
        tokens: shapes.Tokens = self.call("tokenize", {"model": model, field: text_or_messages})
        return tokens

    def detokenize(self, model: str, tokens: Sequence[int]) -> shapes.Detokenized:
        text: shapes.Detokenized = self.call("detokenize", {"model": model, "tokens": tokens})
        return text

    def _follow(self, method: str, params: Mapping[str, Any], on_progress: shapes.OnProgress | None) -> Any:
        if on_progress is None:
            return self.call(method, params)
        call = self.start(method, {**params, "stream": True})
        for value in call:
            on_progress(value)
        return call.result()

    # The connection

    def _connect_again_if_lost(self) -> None:
        """Before a request, so that one which was sent is never sent twice. Takes in what has arrived meanwhile."""
        if self._is_closed:
            raise ClientClosed
        try:
            while self._is_connected:
                self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionLost:
            pass
        self._socket = connect_socket(self._path)
        self._exchange = Exchange(self._path, self._on_notification)
        self._is_connected = True

    def _send(self, frame: bytes, pending: Pending) -> None:
        """Sends a request and takes in what arrives meanwhile.

        A daemon that has many answers for us stops reading until we take some; only sending would wait for ever. One
        that refuses us says so before it has read.
        """
        rest = memoryview(frame)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLOUT)
        while rest and not pending.has_ended:
            events = poll.poll()[0][1]
            if events & ~select.POLLOUT:
                self._receive()
            if events & select.POLLOUT:
                try:
                    rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    continue
                except OSError:
                    return  # who hangs up may have said why; reading finds that, or the end

    def _wait_readable(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise DaemonUnreachable(self._path, "it took the connection but does not answer in time")

    def _receive(self, flags: int = 0) -> None:
        """Raises DaemonUnreachable when the connection ends here: nothing, or nothing that makes sense, came."""
        try:
            chunk = self._socket.recv(_CHUNK_BYTES, flags)
            if not chunk:
                raise ConnectionLost(self._path, "it closed the connection")
            self._exchange.feed(chunk)
        except BlockingIOError:
            raise
        except OSError as error:
            failure = lost(self._path, error)
            self._end(failure)
            raise failure from error
        except DaemonUnreachable as failure:
            self._end(failure)
            raise

    def _end(self, failure: ClientError) -> None:
        self._is_connected = False
        self._socket.close()
        self._exchange.end(failure)
