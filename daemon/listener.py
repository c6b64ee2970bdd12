"""The socket's place in the file system: private, published whole, never taken from a living owner.

Owns the socket file from bind to unlink, and the rule that its directory is the user's alone; the file of a socket that
a supervisor handed over is the supervisor's. Called by `daemon.main` on the main thread before any other starts; the
event loop then accepts on `Listener.socket`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import stat
from typing import Final

from omlxd.daemon.lock import InstanceLock
from omlxd.daemon.paths import MAX_SOCKET_BYTES, SocketPathTooLong
from omlxd.daemon.private import UnsafePlace
from omlxd.rpc.peer import is_welcome, peer_uid

INTERNAL_ERROR: Final = -32603


class SocketInUse(Exception):
    """Somebody answers at the path, or may."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} belongs to a running program; stop it or set OMLXD_SOCKET to another path")
        self.path = path


class Listener:
    """A listening, non-blocking Unix socket at `path`; closing it removes the file if it is ours and still there."""

    def __init__(self, path: str, sock: socket.socket, *, is_ours: bool) -> None:
        self.path = path
        self.socket = sock
        self.is_ours = is_ours
        self._name = path  # where the file is just now
        self._identity = _identity(path) if is_ours else None

    def hide(self) -> None:
        """Takes the name away: clients stay connected, those in the backlog keep their place, and no new one comes.

        Of a socket that was handed over there is nothing to hide: its clients wait for the next daemon.
        """
        self._move(os.path.join(os.path.dirname(self.path), _temporary_name()))

    def show(self) -> None:
        """Gives the name back, with the lock still held."""
        self._move(self.path)

    def has_visitor(self) -> bool:
        """Whether a client has connected that nobody has accepted yet."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Idempotent. To be called with the lock still held: the next owner publishes right after."""
        if self._has_file():
            os.unlink(self._name)
        self._identity = None
        self.socket.close()  # the event loop may have done so before

    def _move(self, name: str) -> None:
        if self._has_file():
            os.rename(self._name, name)
            self._name = name

    def _has_file(self) -> bool:
        """False once somebody has put another file in its place."""
        return self._identity is not None and _identity(self._name) == self._identity

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def adopt(sock: socket.socket) -> Listener:
    """A socket that a supervisor listens on for us; it may be any path, and belongs to the supervisor for good."""
    return Listener(os.path.abspath(os.fsdecode(sock.getsockname())), sock, is_ours=False)


def turn_away(listener: Listener, reason: str) -> None:
    """Answers who waits on a socket that was handed over with an error, and hangs up: nobody will serve them.

    Unanswered, they would have the supervisor start one daemon after another. Strangers are not told the reason.
    """
    error = {"code": INTERNAL_ERROR, "message": f"omlxd cannot start: {reason}", "data": {"kind": "internal"}}
    line = json.dumps({"jsonrpc": "2.0", "error": error, "id": None}).encode() + b"\n"
    while True:
        try:
            client, _ = listener.socket.accept()
        except OSError:
            return  # nobody is left
        with client, contextlib.suppress(OSError):  # who has left already needs no answer
            client.setblocking(False)
            if is_welcome(peer_uid(client), os.geteuid()):
                client.send(line)


def publish(path: str, lock: InstanceLock) -> Listener:
    """Listens at `path`, which nobody else may do: `lock` is the proof. Replaces a socket without an owner.

    The socket is bound under another name and moved to `path` when it is private and listening, so a client finds
    either nothing or a daemon. Raises SocketInUse, UnsafePlace, SocketPathTooLong or OSError.
    """
    _check_vacant(path)
    directory = os.path.dirname(path)
    temporary = os.path.join(directory, _temporary_name())
    if len(os.fsencode(temporary)) > MAX_SOCKET_BYTES:
        raise SocketPathTooLong(temporary, len(os.fsencode(temporary)))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _unlink_if_there(temporary)  # of a crashed process that had our pid
        sock.bind(temporary)
        os.chmod(temporary, 0o600)
        sock.listen(socket.SOMAXCONN)
        sock.setblocking(False)
        os.rename(temporary, path)
        return Listener(path, sock, is_ours=True)
    except BaseException:
        sock.close()
        _unlink_if_there(temporary)
        raise


def _temporary_name() -> str:
    return f".{os.getpid():x}"  # as short as can be: it has to fit into a socket's path as well


def _check_vacant(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UnsafePlace(f"{path} is not a socket; move it away or set OMLXD_SOCKET to another path")
    if _answers(path):
        raise SocketInUse(path)


def _answers(path: str) -> bool:
    """False only where nobody listens. A full backlog or a refusal for another reason is an owner, however slow."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) not in (errno.ECONNREFUSED, errno.ENOENT)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        state = os.lstat(path)
    except FileNotFoundError:
        return None
    return state.st_dev, state.st_ino


def _unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
