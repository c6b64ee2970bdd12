"""Connecting to the daemon's socket, from any thread.

Owns nothing: the socket is the caller's. Blocks for 300 ms at most.
"""

from __future__ import annotations

import errno
import socket
import time

from omlxd.rpc.failures import unreachable

_RETRY_AFTER_S = (0.05, 0.1, 0.15)
_BUSY = (errno.ECONNREFUSED, errno.EAGAIN)


def connect_socket(path: str) -> socket.socket:
    """A blocking stream socket connected to `path`. Raises DaemonUnreachable, after 300 ms of trying if refused."""
    for delay_s in _RETRY_AFTER_S:
        try:
            return _connect_once(path)
        except OSError as error:
            if error.errno not in _BUSY:
                raise unreachable(path, error) from error
        time.sleep(delay_s)
    try:
        return _connect_once(path)
    except OSError as error:
        raise unreachable(path, error) from error


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
