"""Sockets that somebody else listens on for us: launchd's, or those of the LISTEN_FDS protocol that systemd speaks.

Owns the checks on what was handed over; whoever calls owns the sockets. Called once by `daemon.main`, on the main
thread before any other starts. The supervisor keeps the socket's path: it is never unlinked or changed from here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import stat
from collections.abc import MutableMapping, Sequence
from typing import Final, Protocol

SOCKET_NAME: Final = "rpc"  # the key in the agent's Sockets, and systemd's FileDescriptorName

_FIRST_DESCRIPTOR: Final = 3
_VARIABLES: Final = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
_NOT_ACTIVATED: Final = frozenset({errno.ENOENT, errno.ESRCH})  # no socket of that name; not a job of launchd's


class ActivationFailed(Exception):
    """A supervisor hands sockets over, and they cannot be had or are not what the daemon can serve on."""


class Supervisor(Protocol):
    """Whoever listens for us."""

    def descriptors(self, name: str) -> Sequence[int]:
        """The descriptors under `name`, none where nothing is handed over. Once per process."""
        ...


class Launchd:
    """launchd's call, in macOS's libSystem, which every process has loaded."""

    def __init__(self, library: str | None = None) -> None:
        self._system = ctypes.CDLL(library)  # None: what the process has loaded already

    def descriptors(self, name: str) -> Sequence[int]:
        try:
            activate = self._system.launch_activate_socket
        except AttributeError:
            return ()  # this system has no launchd
        activate.restype = ctypes.c_int
        activate.argtypes = [
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.POINTER(ctypes.c_int)),
            ctypes.POINTER(ctypes.c_size_t),
        ]
        array, count = ctypes.POINTER(ctypes.c_int)(), ctypes.c_size_t()
        code = activate(name.encode(), ctypes.byref(array), ctypes.byref(count))  # the error itself, not errno
        if code in _NOT_ACTIVATED:
            return ()
        if code != 0:
            raise ActivationFailed(f"launchd does not hand over its socket {name!r}: {os.strerror(code)} ({code})")
        try:
            return [array[index] for index in range(count.value)]
        finally:
            self._free(array)

    def _free(self, array: ctypes._Pointer[ctypes.c_int]) -> None:
        free = self._system.free
        free.restype = None
        free.argtypes = [ctypes.c_void_p]  # without this the pointer would be cut to an int
        free(array)


class ListenFds:
    """The LISTEN_FDS protocol: descriptors from 3 on, announced in the environment to the process of one pid."""

    def __init__(self, env: MutableMapping[str, str], pid: int) -> None:
        self._env = env
        self._pid = pid

    def descriptors(self, name: str) -> Sequence[int]:
        """Takes the announcement out of the environment, so that no child believes it. Raises ActivationFailed."""
        pid, count, names = (self._env.pop(variable, "") for variable in _VARIABLES)
        if pid != str(self._pid):
            return ()  # nothing was announced, or to a process that we descend from
        if not count.isdecimal():
            raise ActivationFailed(f"LISTEN_FDS is {count!r}, not a number; start omlxd from a socket unit, or without")
        found = range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count))
        if not names:
            return found
        labels = names.split(":")
        if name not in labels or len(labels) != len(found):
            raise ActivationFailed(f"LISTEN_FDNAMES is {names!r}; call the socket {name} (FileDescriptorName={name})")
        return [descriptor for descriptor, label in zip(found, labels, strict=True) if label == name]


def activated_listeners(supervisor: Supervisor, name: str = SOCKET_NAME) -> list[socket.socket]:
    """The listening, non-blocking Unix sockets that `supervisor` hands over under `name`; none if it hands over none.

    Children do not inherit them. Raises ActivationFailed for anything but a listening Unix stream socket.
    """
    return [_checked(descriptor) for descriptor in supervisor.descriptors(name)]


def _checked(descriptor: int) -> socket.socket:
    try:
        is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        is_socket = False
    if not is_socket:
        raise ActivationFailed(f"descriptor {descriptor} was handed over as a socket and is none")
    handed = socket.socket(fileno=descriptor)
    reason = _unfit(handed)
    if reason is not None:
        handed.close()
        raise ActivationFailed(f"descriptor {descriptor} {reason}")
    handed.set_inheritable(False)
    handed.setblocking(False)
    return handed


def _unfit(handed: socket.socket) -> str | None:
    """Why nobody can be served on it; None where it is a listening Unix stream socket."""
    if handed.family != socket.AF_UNIX or handed.type != socket.SOCK_STREAM:
        return "is no Unix stream socket; have the supervisor listen on a path"
    if not handed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "is one client's connection, and omlxd serves all from one process; hand over the listener (Accept=no)"
    return None
