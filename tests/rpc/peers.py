"""Clients for the wire tests: raw bytes in, decoded JSON out, and a server to talk to.

Everything runs on the test's own event loop; a socket in a short temporary directory is the only thing shared.
"""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import SocketAttribute, SocketStream

from omlxd.engine.api import Backend
from omlxd.rpc.connection import RpcLimits
from omlxd.rpc.server import Server


def bound(path: Path) -> socket.socket:
    """A listening socket as the daemon hands it over."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(64)
    listener.setblocking(False)
    return listener


class Peer:
    """One client. Line framing unless `headers` is set."""

    def __init__(self, stream: SocketStream, *, headers: bool = False) -> None:
        self.stream = stream
        self.headers = headers
        self.notes: list[dict[str, Any]] = []
        self._buffer = bytearray()
        self._next_id = 0

    @property
    def socket(self) -> socket.socket:
        return self.stream.extra(SocketAttribute.raw_socket)

    async def send(self, *messages: object) -> None:
        """Each of `messages`, JSON text or what becomes it, in one write."""
        await self.stream.send(b"".join(self._framed(message) for message in messages))

    async def read(self) -> Any:
        """The next message, whatever it is."""
        with anyio.fail_after(10):
            body = await (self._read_headers() if self.headers else self._read_line())
        return json.loads(body)

    async def answer(self) -> Any:
        """The next response; the notifications before it go to `notes`."""
        while True:
            message = await self.read()
            if isinstance(message, list) or "method" not in message:
                return message
            self.notes.append(message)

    async def ask(self, method: str, /, **params: Any) -> Any:
        """The response to one request."""
        await self.send(self.request(method, **params))
        return await self.answer()

    async def result(self, method: str, /, **params: Any) -> Any:
        answer = await self.ask(method, **params)
        assert "error" not in answer, answer
        return answer["result"]

    async def error(self, method: str, /, **params: Any) -> Any:
        answer = await self.ask(method, **params)
        assert "result" not in answer, answer
        return answer["error"]

    def request(self, method: str, /, **params: Any) -> dict[str, Any]:
        self._next_id += 1
        return {"jsonrpc": "2.0", "id": self._next_id, "method": method, "params": params}

    async def read_some(self) -> None:
        """Some bytes of a message, and not its rest."""
        with anyio.fail_after(10):
            await self.stream.receive(1)

    async def at_end(self) -> bool:
        """Whether the server has closed the connection, without another byte."""
        with anyio.fail_after(10):
            try:
                return not await self.stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return True

    def _framed(self, message: object) -> bytes:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        return b"Content-Length: %d\r\n\r\n%b" % (len(body), body) if self.headers else body + b"\n"

    async def _read_line(self) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0:
            self._buffer += await self.stream.receive()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    async def _read_headers(self) -> bytes:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            self._buffer += await self.stream.receive()
        header = bytes(self._buffer[:end])
        assert header.startswith(b"Content-Length: ")
        length = int(header.removeprefix(b"Content-Length: "))
        del self._buffer[: end + 4]
        while len(self._buffer) < length:
            self._buffer += await self.stream.receive()
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return body


class Running:
    """A server that is being served, and clients of it."""

    def __init__(self, server: Server, path: Path) -> None:
        self.server = server
        self.path = path

    @asynccontextmanager
    async def peer(self, *, headers: bool = False) -> AsyncIterator[Peer]:
        async with await anyio.connect_unix(self.path) as stream:
            yield Peer(stream, headers=headers)


@asynccontextmanager
async def serving(backend: Backend, path: Path, limits: RpcLimits | None = None) -> AsyncIterator[Running]:
    server = Server(backend, limits)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve, bound(path))
        yield Running(server, path)
        tasks.cancel_scope.cancel()


async def until(condition: Any) -> None:
    """Lets the loop run until `condition()` holds; a test that waits in vain fails after 10 s."""
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.001)
