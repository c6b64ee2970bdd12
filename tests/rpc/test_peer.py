"""Whom the kernel says is calling, and whether they are still there."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

import pytest

from omlxd.rpc.peer import has_hung_up, is_welcome, linux_uid, macos_uid, peer_uid


@dataclass
class Kernel:
    """A socket whose kernel answers `answer` to the option (level, name, size) it is asked for."""

    expected: tuple[int, int, int]
    answer: bytes

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        assert (level, option, size) == self.expected
        return self.answer


def test_linux_gives_pid_uid_gid() -> None:
    assert linux_uid(Kernel((socket.SOL_SOCKET, 17, 12), struct.pack("=iII", 4711, 501, 20))) == 501


def test_macos_gives_version_uid_groups() -> None:
    xucred = struct.pack("=IIhxx16I", 0, 501, 1, 20, *[0] * 15)
    assert len(xucred) == 76
    assert macos_uid(Kernel((0, 1, 76), xucred)) == 501


@pytest.mark.parametrize("answer", [struct.pack("=IIhxx16I", 1, 501, 1, *[0] * 16), b"", b"\0\0\0\0"])
def test_another_structure_is_no_uid(answer: bytes) -> None:
    with pytest.raises(OSError, match="LOCAL_PEERCRED"):
        macos_uid(Kernel((0, 1, 76), answer))


def test_this_kernel_names_this_user() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_uid(ours) == os.getuid()


def test_own_user_and_root_are_welcome_and_nobody_else() -> None:
    assert [uid for uid in (0, 501, 502) if is_welcome(uid, own_uid=501)] == [0, 501]


def test_half_a_close_is_no_hang_up_and_a_whole_one_is() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        assert not has_hung_up(ours)
        theirs.shutdown(socket.SHUT_WR)
        assert ours.recv(1) == b""
        assert not has_hung_up(ours)
        theirs.close()
        assert has_hung_up(ours)
