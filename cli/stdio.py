"""`omlxctl stdio`: standard input and output become the daemon's socket, for clients that can only start a process.

Knows nothing of frames: bytes go both ways as they are, each way at its own pace. Two threads: `stdin-to-socket` reads
standard input, the main thread the socket.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading

from omlxd.cli.context import Context
from omlxd.cli.errors import DONE, PIPE_CLOSED
from omlxd.cli.parser import Parser
from omlxd.rpc.client import connect_socket

_CHUNK_BYTES = 1 << 16


class Stdio:
    """Ends when the daemon ends the connection; the end of standard input is passed on and the last answers awaited."""

    def arguments(self, parser: Parser) -> None:
        pass

    def run(self, context: Context, given: argparse.Namespace) -> int:
        context.connect_or_start().close()
        with connect_socket(context.paths.socket) as connected:
            # A daemon thread: it may be reading a standard input that nobody will ever write to or close.
            threading.Thread(target=_send, args=(connected,), name="stdin-to-socket", daemon=True).start()
            return _receive(connected)


def _send(connected: socket.socket) -> None:
    try:
        while chunk := os.read(0, _CHUNK_BYTES):
            connected.sendall(chunk)
        connected.shutdown(socket.SHUT_WR)
    except OSError:
        return  # the connection has ended, which the main thread sees too


def _receive(connected: socket.socket) -> int:
    while True:
        try:
            chunk = connected.recv(_CHUNK_BYTES)
        except ConnectionError:
            return DONE
        if not chunk:
            return DONE
        rest = memoryview(chunk)
        while rest:
            try:
                rest = rest[os.write(1, rest) :]
            except BrokenPipeError:
                return PIPE_CLOSED
