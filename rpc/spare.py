"""A file descriptor kept for the day when there are none: with it a waiting client is turned away, not left hanging.

Owned by the server's accept loop. Without it, accept would fail again and again for the same client, at full speed.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import SocketListener


class SpareDescriptor:
    """One open descriptor that is given up to accept, and at once close, one connection."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._close()

    async def turn_away(self, listener: SocketListener) -> None:
        """Closes the connection that waits first, if it still waits."""
        self._close()
        try:
            with anyio.move_on_after(1):
                await (await listener.accept()).aclose()
        except anyio.BrokenResourceError:
            return  # another thread took the descriptor; the client waits until the next try
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
