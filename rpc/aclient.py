"""The Python client for asyncio: `async with connect() as omlx: async for delta in omlx.chat(model, messages): ...`.

Owns its socket, the requests running on it and one task that reads; lives on one event loop. The one module of the
clients that knows asyncio: whoever does not import it does not pay for it. `rpc.client` is the same for programs that
block.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from omlxd.rpc.address import socket_path
from omlxd.rpc.dial import connect_socket
from omlxd.rpc.exchange import Exchange, Pending, line
from omlxd.rpc.failures import ClientClosed, ClientError, ConnectionLost, DaemonUnreachable, RpcError, lost
from omlxd.rpc.peer import has_hung_up

if TYPE_CHECKING:
    from typing import Unpack

    from omlxd.rpc import shapes
    from omlxd.rpc.exchange import OnNotification, Params

_CHUNK_BYTES = 1 << 18


def connect(path: str | None = None, *, on_notification: OnNotification | None = None) -> Client:
    """A client of the daemon at `path`: $OMLXD_SOCKET, else omlxd.sock in $OMLXD_HOME, else in ~/.omlxd.

    `async with` connects, and raises as `rpc.client.connect` does.
    """
    return Client(socket_path(os.environ) if path is None else path, on_notification=on_notification)


class Call:
    """One running request. Iterating yields the `value` of each of its `$/progress`, and ends when it has ended.

    A task that is cancelled while it waits here cancels the request.
    """

    def __init__(self, link: _Link, pending: Pending) -> None:
        self.id = pending.id
        self._link = link
        self._pending = pending
        self._changed = asyncio.Event()
        pending.changed = self._changed.set

    @property
    def has_ended(self) -> bool:
        return self._pending.has_ended

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Raises DaemonUnreachable. An error that the daemon answers is `result`'s to raise."""
        pending = self._pending
        while pending.values or not pending.has_ended:
            if pending.values:
                yield pending.values.popleft()
            else:
                await self._wait()
        if isinstance(pending.failure, DaemonUnreachable):
            raise pending.failure

    async def result(self) -> Any:
        """Waits for the answer. Raises RpcError for an error, DaemonUnreachable when none can come."""
        while not self._pending.has_ended:
            await self._wait()
        return self._pending.outcome()

    def cancel(self) -> None:
        """Asks the daemon to stop; the answer, an RpcError -32800 as a rule, still comes. Harmless after the end."""
        if not self._pending.has_ended:
            self._link.write(line("$/cancelRequest", {"id": self.id}))

    async def _wait(self) -> None:
        self._changed.clear()
        try:
            await self._changed.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise


class Answer:
    """A generation. Iterating yields its deltas as they come; `result` is all of it.

    The request is sent when it is first waited for: by the loop, by `result`, or by `async with`, at whose end it is
    cancelled if it has not ended. Raises what `Call` raises, from the loop too; an answer that was cancelled with
    `cancel` just ends, and its result is what there was by then.
    """

    def __init__(
        self, client: Client, method: str, params: Mapping[str, Any], on_progress: shapes.OnProgress | None
    ) -> None:
        self._client = client
        self._method = method
        self._params = params
        self._on_progress = on_progress
        self._call: Call | None = None
        self._is_cancelled = False

    async def __aenter__(self) -> Answer:
        await self._started()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def __aiter__(self) -> AsyncIterator[shapes.Delta]:
        async for value in await self._started():
            if value["kind"] == "delta":
                yield value
            elif self._on_progress is not None:
                self._on_progress(value)
        await self.result()

    async def result(self) -> shapes.Generated:
        """Waits for the end; deltas that were not taken stay to be iterated."""
        try:
            result: shapes.Generated = await (await self._started()).result()
        except RpcError as error:
            if self._is_cancelled and error.partial is not None:
                partial: shapes.Generated = error.partial
                return partial
            raise
        return result

    def cancel(self) -> None:
        """Asks the daemon to stop: it does within a token. Harmless before the beginning and after the end."""
        if self._call is not None and not self._call.has_ended:
            self._is_cancelled = True
            self._call.cancel()

    async def _started(self) -> Call:
        if self._call is None:
            self._call = await self._client.start(self._method, self._params)
        return self._call


class _Link:
    """One connection from its beginning to its end, and the two tasks that read and write it.

    Not asyncio's streams: when writing fails those forget what was received, and so why a daemon hung up.
    """

    def __init__(self, connected: socket.socket, path: str, on_notification: OnNotification | None) -> None:
        connected.setblocking(False)
        self.exchange = Exchange(path, on_notification)
        self._path = path
        self._socket = connected
        self._outgoing = bytearray()
        self._is_alive = True
        self._filled, self._drained = asyncio.Event(), asyncio.Event()
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())

    @property
    def is_alive(self) -> bool:
        """Whether a request sent now can be answered, as far as this end can know."""
        return self._is_alive and not has_hung_up(self._socket)

    def write(self, frame: bytes) -> None:
        """Takes `frame` to be sent when the daemon takes it; of no effect after the end."""
        self._outgoing += frame
        self._drained.clear()
        self._filled.set()

    async def drain(self) -> None:
        """Returns when all that was written is sent, or never will be."""
        if self._is_alive:
            await self._drained.wait()

    async def close(self) -> None:
        if self._is_alive:
            self._end(ClientClosed())
            self._reading.cancel()
        await asyncio.wait([self._reading, self._writing])
        self._socket.close()
        if not self._reading.cancelled():
            self._reading.result()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._filled.wait()
            self._filled.clear()
            frames, self._outgoing = self._outgoing, bytearray()
            try:
                await loop.sock_sendall(self._socket, frames)
            except OSError:
                self._drained.set()
                return  # the reader finds the end, and what was said before it
            if not self._outgoing:
                self._drained.set()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        failure: ClientError = ConnectionLost(self._path, "its messages are no longer read")
        try:
            while chunk := await loop.sock_recv(self._socket, _CHUNK_BYTES):
                self.exchange.feed(chunk)
            failure = ConnectionLost(self._path, "it closed the connection")
        except DaemonUnreachable as nonsense:
            failure = nonsense
        except OSError as error:
            failure = lost(self._path, error)
        finally:  # also when `on_notification` raised: nobody may wait for what will not be read
            self._end(failure)
            await asyncio.wait([self._writing])
            self._socket.close()  # not before both tasks have let go of it: its number may be another's at once

    def _end(self, failure: ClientError) -> None:
        self._is_alive = False
        self._drained.set()
        self.exchange.end(failure)
        self._writing.cancel()


class Client:
    """A connection to the daemon, for one event loop. Several calls may run at once, from several tasks.

    What runs when the connection ends fails with ConnectionLost, and is never sent again. The next request opens a new
    connection, or raises NotRunning. `on_notification(method, params)` is given what belongs to no call of this client.
    """

    def __init__(self, path: str, *, on_notification: OnNotification | None = None) -> None:
        self._path = path
        self._on_notification = on_notification
        self._link: _Link | None = None
        self._opening = asyncio.Lock()
        self._is_closed = False

    async def __aenter__(self) -> Client:
        await self._connected()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection, which cancels what runs on it. Idempotent. Raises what `on_notification` raised."""
        self._is_closed = True
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    # Any method

    async def call(self, method: str, params: Params | None = None) -> Any:
        """Sends a request and waits for its result. Raises RpcError, DaemonUnreachable."""
        return await (await self.start(method, params)).result()

    async def start(self, method: str, params: Params | None = None) -> Call:
        """Sends a request and returns when it is on its way. Raises DaemonUnreachable."""
        link = await self._connected()
        pending, frame = link.exchange.request(method, params)
        call = Call(link, pending)
        link.write(frame)
        try:
            await link.drain()
        except asyncio.CancelledError:
            call.cancel()
            raise
        return call

    async def notify(self, method: str, params: Params | None = None) -> None:
        """Sends a notification; nothing comes back."""
        link = await self._connected()
        link.write(line(method, params))
        await link.drain()

    # The methods by name: what they take and give is docs/protocol.md's

    async def ping(self) -> str:
        pong: str = await self.call("ping")
        return pong

    async def info(self) -> shapes.DaemonInfo:
        info: shapes.DaemonInfo = await self.call("daemon.info")
        return info

    async def status(self) -> shapes.Status:
        status: shapes.Status = await self.call("daemon.status")
        return status

    async def shutdown(self, grace_s: float | None = None) -> None:
        """Returns when the daemon has begun to drain."""
        await self.call("daemon.shutdown", {"grace_s": grace_s})

    async def models(self) -> list[shapes.ModelLine]:
        models: list[shapes.ModelLine] = await self.call("models.list")
        return models

    async def load(
        self, model: str, *, on_progress: shapes.OnProgress | None = None, **options: Unpack[shapes.LoadOptions]
    ) -> shapes.ModelLine:
        entry: shapes.ModelLine = await self._follow("models.load", {"model": model, **options}, on_progress)
        return entry

    async def unload(self, model: str, *, now: bool = False) -> shapes.UnloadedLine:
        entry: shapes.UnloadedLine = await self.call("models.unload", {"model": model, "now": now})
        return entry

    async def pull(
        self, source: str, *, name: str | None = None, on_progress: shapes.OnProgress | None = None
    ) -> shapes.ModelLine:
        entry: shapes.ModelLine = await self._follow("models.pull", {"source": source, "name": name}, on_progress)
        return entry

    def chat(
        self,
        model: str,
        messages: Sequence[shapes.Message],
        *,
        on_progress: shapes.OnProgress | None = None,
        **options: Unpack[shapes.ChatOptions],
    ) -> Answer:
        """An answer, which is asked for when it is first waited for."""
        params = {"model": model, "messages": messages, **options, "stream": True}
        return Answer(self, "generate.chat", params, on_progress)

    def complete(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        on_progress: shapes.OnProgress | None = None,
        **options: Unpack[shapes.CompleteOptions],
    ) -> Answer:
        """An answer, which is asked for when it is first waited for."""
        params = {"model": model, "prompt": prompt, **options, "stream": True}
        return Answer(self, "generate.complete", params, on_progress)

    async def tokenize(self, model: str, text_or_messages: str | Sequence[shapes.Message]) -> shapes.Tokens:
        field = "text" if isinstance(text_or_messages, str) else "messages"
        tokens: shapes.Tokens = await self.call("tokenize", {"model": model, field: text_or_messages})
        return tokens

    async def detokenize(self, model: str, tokens: Sequence[int]) -> shapes.Detokenized:
        text: shapes.Detokenized = await self.call("detokenize", {"model": model, "tokens": tokens})
        return text

    async def _follow(self, method: str, params: Mapping[str, Any], on_progress: shapes.OnProgress | None) -> Any:
        if on_progress is None:
            return await self.call(method, params)
        call = await self.start(method, {**params, "stream": True})
        async for value in call:
            on_progress(value)
        return await call.result()

    async def _connected(self) -> _Link:
        async with self._opening:
            if self._is_closed:
                raise ClientClosed
            if self._link is None or not self._link.is_alive:
                connected = await asyncio.to_thread(connect_socket, self._path)
                self._link = _Link(connected, self._path, self._on_notification)
            return self._link
