"""The server: accepts connections on a socket that somebody else bound, and keeps them until it is cancelled.

Owns the listening socket from `serve` on, and every connection; lives on the event loop. It knows no path: publishing
and removing one is the daemon's, and libraries that are given a path take it from whoever serves there.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from typing import Final

import anyio
from anyio.abc import SocketAttribute, SocketListener, SocketStream, TaskGroup

from omlxd.engine.api import Backend, QueueFull
from omlxd.rpc.connection import Connection, RpcLimits
from omlxd.rpc.dispatch import Dispatcher, response
from omlxd.rpc.envelope import NULL
from omlxd.rpc.errors import CODES, ErrorBody
from omlxd.rpc.methods import METHODS
from omlxd.rpc.peer import is_welcome, peer_uid
from omlxd.rpc.spare import SpareDescriptor

log = logging.getLogger("omlxd.rpc")

_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
_PASSING: Final = frozenset({errno.ECONNABORTED, errno.ENOBUFS, errno.ENOMEM})
_BREATH_S: Final = 0.1
RETRY_MS: Final = 1000


class Server:
    """Serves `backend` to every client of this user."""

    def __init__(self, backend: Backend, limits: RpcLimits | None = None) -> None:
        self._backend = backend
        self._limits = limits or RpcLimits()
        self._dispatcher = Dispatcher(METHODS)
        self._connections: set[Connection] = set()
        self._accepting: anyio.CancelScope | None = None  # made on the loop, while clients are accepted
        self._is_draining = False
        self._is_closing = False
        self._moved_at = time.monotonic()  # the last time that a client came or went

    async def serve(self, listener: socket.socket) -> None:
        """Runs until cancelled; then every connection is closed and its calls are abandoned.

        `listener` is a bound, listening, non-blocking Unix stream socket and belongs to the server from here on; its
        path is left alone. A socket that cannot accept at all is a BrokenResourceError, in an exception group.
        """
        async with anyio.create_task_group() as tasks:
            try:
                async with await SocketListener.from_socket(listener) as accepting:
                    await self._accept_until_drained(accepting, tasks)
                await anyio.sleep_forever()
            finally:
                self._is_closing = True
                for connection in list(self._connections):
                    connection.abandon()

    def quiet_since(self) -> float | None:
        """Since when no client has come, gone or been answered, on the monotonic clock; None while an answer is due."""
        activities = [connection.activity for connection in self._connections]
        if not all(activity.is_idle for activity in activities):
            return None
        return max([self._moved_at, *(activity.ended_at for activity in activities)])

    def stop_accepting(self) -> None:
        """From now on nobody is let in; connections that exist go on."""
        self._is_draining = True
        if self._accepting is not None:
            self._accepting.cancel()

    async def drain(self) -> None:
        """Stops accepting connections; returns when no request runs and every answer is written.

        A client that does not read can delay this for ever, so the caller sets the deadline. What is new on the
        connections that exist is still answered: refusing work is the backend's.
        """
        self.stop_accepting()
        while busy := [connection for connection in self._connections if not connection.activity.is_idle]:
            await busy[0].activity.wait_idle()

    async def _accept_until_drained(self, listener: SocketListener, tasks: TaskGroup) -> None:
        with anyio.CancelScope() as self._accepting:
            if not self._is_draining:
                await self._accept_all(listener, tasks)

    async def _accept_all(self, listener: SocketListener, tasks: TaskGroup) -> None:
        with SpareDescriptor() as spare:
            while True:
                try:
                    stream = await listener.accept()
                except anyio.BrokenResourceError as exc:
                    await self._survive(exc, listener, spare)
                else:
                    tasks.start_soon(self._serve_one, stream)

    async def _survive(self, exc: anyio.BrokenResourceError, listener: SocketListener, spare: SpareDescriptor) -> None:
        """Goes on after a failed accept where the next may succeed; raises `exc` where none will."""
        code = exc.__cause__.errno if isinstance(exc.__cause__, OSError) else None
        if code in _OUT_OF_DESCRIPTORS:
            count = len(self._connections)
            log.warning("refusing clients: %d are connected and no file is left to open", count)
            await spare.turn_away(listener, _is_welcome, response(NULL, _full(count)))
        elif code not in _PASSING:
            raise exc
        await anyio.sleep(_BREATH_S)

    async def _serve_one(self, stream: SocketStream) -> None:
        """One connection, from the first look at its peer. Shielded: `serve` ends it by `abandon`, in good order."""
        with anyio.CancelScope(shield=True):
            if self._is_closing or not _is_welcome(stream):
                await stream.aclose()
                return
            connection = Connection(stream, backend=self._backend, dispatcher=self._dispatcher, limits=self._limits)
            self._connections.add(connection)
            self._moved_at = time.monotonic()
            try:
                await connection.run()
            except Exception:  # one connection's bug is not the others'
                log.exception("a connection ended by an internal error")
            finally:
                self._connections.discard(connection)
                self._moved_at = time.monotonic()


def _full(count: int) -> ErrorBody:
    message = (
        f"{count} clients are connected and the daemon may open no more files; close some, or raise its limit of open "
        "files (ulimit -n) and start it again"
    )
    return ErrorBody(CODES[QueueFull], message, {"kind": QueueFull.kind, "depth": count, "retry_after_ms": RETRY_MS})


def _is_welcome(stream: SocketStream) -> bool:
    try:
        uid = peer_uid(stream.extra(SocketAttribute.raw_socket))
    except OSError as exc:
        log.warning("refused a client whose user is unknown: %s", exc)
        return False
    if not is_welcome(uid, os.geteuid()):
        log.warning("refused a client of user %d; only user %d may connect", uid, os.geteuid())
        return False
    return True
