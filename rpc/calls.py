"""A call: one request while it is being answered, as its method sees it, and how it is stopped.

Owned by the connection that read it; lives on the event loop. A call is stopped in one of two ways: `cancel`, when the
client asks and waits for the answer, and `abandon`, when nobody is there to hear it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar

import anyio
import msgspec
from msgspec import Raw, Struct

from omlxd.engine.api import Backend, Cancelled, Subscription
from omlxd.rpc.envelope import Key, Request, key_of

T = TypeVar("T")


class Client(Protocol):
    """What a method may ask of the connection that a call came from."""

    is_initialized: bool

    async def notify(self, body: bytes) -> None:
        """Sends a notification; returns when the socket has taken it, or at once when the peer is gone."""
        ...

    def cancel(self, *, key: Key | None, token: Key | None) -> bool:
        """Stops the running calls of that id or token; says whether there was one."""
        ...

    def follow(self, subscription: Subscription) -> str | None:
        """Sends the subscription's events after what is answered now, to the connection's end; closes it then.

        Returns why not, if it does not.
        """
        ...

    def leave(self) -> None:
        """Reads nothing more, stops what runs, and closes this connection when all is answered."""
        ...


class _Asked(Struct):
    stream: Raw = Raw(b"")
    partialResultToken: Raw = Raw(b"")
    workDoneToken: Raw = Raw(b"")


_decode_asked = msgspec.json.Decoder(_Asked).decode


class Call:
    """One request of one client.

    The tokens are the JSON texts under which the client wants deltas and progress, None where it wants none. They are
    read before the method starts, so that a cancel by token can follow in the same write.
    """

    __slots__ = (
        "_is_cancelled",
        "_scope",
        "_stop",
        "backend",
        "client",
        "delta_token",
        "id",
        "key",
        "method",
        "params",
        "progress_token",
    )

    def __init__(self, request: Request, client: Client, backend: Backend) -> None:
        self.method = request.method
        self.params = request.params
        self.id = request.id
        self.key = None if request.id in (None, b"null") else key_of(request.id or b"")
        self.client = client
        self.backend = backend
        self.delta_token: bytes | None = None
        self.progress_token: bytes | None = None
        self._scope = anyio.CancelScope()
        self._stop: Callable[[], None] | None = None
        self._is_cancelled = False

    def read_tokens(self) -> None:
        """For the methods that take time. Ill-typed ones are left for the method to refuse."""
        if self.params is None:
            return
        try:
            asked = _decode_asked(self.params)
        except (msgspec.DecodeError, RecursionError):
            return
        own = self.id if bytes(asked.stream) == b"true" else None
        self.delta_token = _token(asked.partialResultToken) or own
        self.progress_token = _token(asked.workDoneToken) or own

    def has_token(self, token: Key) -> bool:
        return any(key_of(own) == token for own in (self.delta_token, self.progress_token) if own is not None)

    def cancel(self) -> None:
        """Idempotent; also before the method has begun, and after it has ended."""
        self._is_cancelled = True
        if self._stop is not None:
            self._stop()

    def abandon(self) -> None:
        self.cancel()
        self._scope.cancel()

    async def wait_for(self, work: Callable[[], Awaitable[T]], stop: Callable[[], None] | None = None) -> T:
        """What `work` gives; used once per call. `stop` is how a cancel ends the work, where giving up waiting is not.

        Raises Cancelled when the waiting was given up; what was cancelled before is not begun.
        """
        self._stop = stop or self._scope.cancel
        if self._is_cancelled:
            self._stop()
        try:
            with self._scope:
                if not self._scope.cancel_called:
                    return await work()
        finally:
            self._stop = None
        raise Cancelled


_TOKEN_STARTS: Final = frozenset(bytes([start]) for start in b'"-0123456789')


def _token(text: Raw) -> bytes | None:
    """`text` where it can be a token: a string or a number."""
    return bytes(text) if bytes(memoryview(text)[:1]) in _TOKEN_STARTS else None
