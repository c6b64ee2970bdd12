"""MLX's allocator as the memory guard sees it: the pool of freed buffers it keeps, and what the GPU may have.

`NoAllocator` stands for it until a model is first wanted, for importing mlx takes a second and is not done for a
reading. The counters and `return_pool` may be used on any thread.
"""

from __future__ import annotations

from typing import Protocol

_MOST_POOL_BYTES = 2 * 2**30
_POOL_PERCENT = 5  # of the memory limit


class Allocator(Protocol):
    """Bytes throughout."""

    def active_bytes(self) -> int:
        """Of arrays that somebody holds."""
        ...

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

    def active_bytes(self) -> int:
        return 0

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
        wanted = min(_MOST_POOL_BYTES, limit_bytes * _POOL_PERCENT // 100)
        before = mx.set_cache_limit(wanted)
        if before < wanted:
            mx.set_cache_limit(before)  # the CPU's is smaller by itself
        if wired_limit_bytes is not None:
            mx.set_wired_limit(wired_limit_bytes)

    def active_bytes(self) -> int:
        return int(self._mx.get_active_memory())

    def pool_bytes(self) -> int:
        return int(self._mx.get_cache_memory())

    def return_pool(self) -> int:
        before = self.pool_bytes()
        self._mx.clear_cache()
        return max(0, before - self.pool_bytes())

    def working_set(self) -> int | None:
        size = self._mx.device_info().get("max_recommended_working_set_size")
        return int(size) if size is not None else None
