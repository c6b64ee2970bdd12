"""MLX's allocator as the memory guard sees it: the pool of freed buffers it keeps, and what the GPU may have.

`NoAllocator` stands for it until a model is first wanted, for importing mlx takes a second and is not done for a
reading. The counters and `return_pool` may be used on any thread.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Protocol

_MOST_POOL_BYTES = 2 * 2**30
_POOL_PERCENT = 5  # of the memory limit


_M_MMAP_THRESHOLD = -3  # of <malloc.h>
_MAPPED_BYTES = 2**20


class Allocator(Protocol):
    """Bytes throughout."""

    def pool_bytes(self) -> int:
        """Of buffers that nobody holds and that are kept for the next array."""
        ...

    def return_pool(self) -> int:
        """Gives the pool back to the system; returns its bytes. The footprint may show it seconds later."""
        ...

    def working_set(self) -> int | None:
        """What the GPU may have at most; None without one."""
        ...


class NoAllocator:
    """Before mlx is there."""

    def pool_bytes(self) -> int:
        return 0

    def return_pool(self) -> int:
        return 0

    def working_set(self) -> int | None:
        return None


class MlxAllocator:
    """Made once, at the first load, on the loader thread: sets MLX's own limits."""

    def __init__(self, limit_bytes: int, wired_limit_bytes: int | None = None) -> None:
        """Keeps MLX's pool to a small share of `limit_bytes`: by default it keeps everything that was ever freed.

        The wired limit stays as it is unless one is given: setting it is the reported trigger of kernel panics.
        """
        import mlx.core as mx

        self._mx = mx
        self._heap = Heap()
        wanted = min(_MOST_POOL_BYTES, limit_bytes * _POOL_PERCENT // 100)
        before = mx.set_cache_limit(wanted)
        if before < wanted:
            mx.set_cache_limit(before)  # the CPU's is smaller by itself
        if wired_limit_bytes is not None:
            mx.set_wired_limit(wired_limit_bytes)

    def pool_bytes(self) -> int:
        return int(self._mx.get_cache_memory())

    def return_pool(self) -> int:
        before = self.pool_bytes()
        self._mx.clear_cache()
        self._heap.trim()
        return max(0, before - self.pool_bytes())

    def working_set(self) -> int | None:
        size = self._mx.device_info().get("max_recommended_working_set_size")
        return int(size) if size is not None else None


class Heap:
    """The C library's heap, where MLX's CPU arrays live on Linux; nothing elsewhere.

    By itself glibc keeps more and more of what is freed: the size from which on it maps memory on its own, and so
    returns it at once, rises with every large array that goes.
    """

    def __init__(self) -> None:
        self._libc = _glibc()
        if self._libc is not None:
            self._libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)

    def trim(self) -> None:
        """Returns what is free in it to the system."""
        if self._libc is not None:
            self._libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    try:
        libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
    except AttributeError:
        return None  # another C library
    return libc
