"""A file descriptor kept for the day when there are none: with it waiting clients are told so, not left hanging.

Owned by the server's accept loop. Without it, accept would fail again and again for the same client, at full speed.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import anyio
from anyio.abc import SocketAttribute, SocketListener, SocketStream

from omlxd.rpc.framing import FrameReader

_FIRST_BYTES: Final = 1 << 16


class SpareDescriptor:
    """One open descriptor that is given up to accept, answer and close one connection after the other."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._close()

    async def turn_away(
        self, listener: SocketListener, is_welcome: Callable[[SocketStream], bool], answer: bytes
    ) -> None:
        """Hangs up on whoever waits now; who is welcome gets `answer`, a JSON text, first."""
        self._close()
        try:
            while _has_waiting(listener.extra(SocketAttribute.raw_socket)):
                async with await listener.accept() as stream:
                    if is_welcome(stream):
                        _answer(stream.extra(SocketAttribute.raw_socket), answer)
        except anyio.BrokenResourceError:
            return  # another thread took the descriptor; the clients wait until the next try
        finally:
            self._open()

    def _open(self) -> None:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(os.devnull, os.O_RDONLY)
            except OSError:
                self._descriptor = None

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _has_waiting(listening: socket.socket) -> bool:
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    return bool(poll.poll(0))


def _answer(client: socket.socket, answer: bytes) -> None:
    """Framed as the client frames, if it has sent its first byte. Never waits: who takes nothing gets nothing."""
    frames = FrameReader(_FIRST_BYTES)
    with contextlib.suppress(OSError):  # nothing has come yet; or it has left, which the next line finds
        frames.feed(client.recv(_FIRST_BYTES))  # read, so that hanging up is no reset
    with contextlib.suppress(OSError):
        client.send(frames.wrap(answer))
