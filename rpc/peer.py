"""What the kernel knows about the other end of a Unix socket: its user id, and whether it is still there.

Stateless. The uid is asked for once per connection, before a byte of it is read; one function per platform, because
each kernel has its own option and its own structure.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
from collections.abc import Callable
from typing import Final, Protocol

_UCRED: Final = struct.Struct("=iII")  # Linux: pid, uid, gid
_XUCRED_HEAD: Final = struct.Struct("=II")  # macOS: version, uid; the groups follow
_XUCRED_BYTES: Final = 76
_XUCRED_VERSION: Final = 0
_LINUX_SO_PEERCRED: Final = 17
_MACOS_SOL_LOCAL: Final = 0
_MACOS_LOCAL_PEERCRED: Final = 1


class Options(Protocol):
    """The one method of a socket that is needed here."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def linux_uid(peer: Options) -> int:
    """The uid at the time of connect; readable also after the peer is gone."""
    _, uid, _ = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, _LINUX_SO_PEERCRED, _UCRED.size))
    return int(uid)


def macos_uid(peer: Options) -> int:
    """Raises OSError when the kernel answers with a structure of another version."""
    answer = peer.getsockopt(_MACOS_SOL_LOCAL, _MACOS_LOCAL_PEERCRED, _XUCRED_BYTES)
    if len(answer) < _XUCRED_HEAD.size:
        raise OSError(f"LOCAL_PEERCRED gave {len(answer)} bytes, its uid needs {_XUCRED_HEAD.size}")
    version, uid = _XUCRED_HEAD.unpack_from(answer)
    if version != _XUCRED_VERSION:
        raise OSError(f"LOCAL_PEERCRED gave version {version}, only {_XUCRED_VERSION} is known")
    return int(uid)


READERS: Final[dict[str, Callable[[Options], int]]] = {"linux": linux_uid, "darwin": macos_uid}


def peer_uid(peer: Options, platform: str = sys.platform) -> int:
    """The peer's user id. Raises OSError when the kernel does not say, KeyError on a platform that is not supported."""
    return READERS[platform](peer)


def is_welcome(uid: int, own_uid: int) -> bool:
    """The daemon's own user and root may connect, nobody else."""
    return uid in (own_uid, 0)


def has_hung_up(connected: socket.socket) -> bool:
    """Whether the peer has closed its end altogether, and will never read again; costs one system call.

    Reading cannot tell: end-of-file also follows `shutdown(SHUT_WR)`, after which a peer still reads its answers. Both
    kernels raise POLLHUP on a socket that is polled for writing alone only when the other end is closed for good: Linux
    when both directions are down, macOS when sending is.
    """
    poll = select.poll()
    poll.register(connected, select.POLLOUT)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))
