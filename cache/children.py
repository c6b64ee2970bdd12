"""The blocks that continue one block: found by chain key, or by how many first tokens they share with a prompt.

A plain container of one prefix tree, under the same rule as the tree: its caller holds the hot tier's lock. Sorted by
token bytes, because the blocks that share the most with a prompt are then next to where it would stand: thousands of
short prompts may begin alike, and a lookup must not compare itself with each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

from omlxd.cache.keys import BlockSpec, common_run, shared


class Specified(Protocol):
    """Something that a BlockSpec names."""

    @property
    def spec(self) -> BlockSpec: ...


B = TypeVar("B", bound=Specified)


class Children(Generic[B]):
    """Blocks that begin at the same position, after the same tokens."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, B] = {}
        self._sorted: list[B] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[B]:
        return iter(self._sorted)

    def get(self, key: bytes) -> B | None:
        return self._by_key.get(key)

    def add(self, block: B) -> None:
        self._by_key[block.spec.key] = block
        self._sorted.insert(self._place(block.spec.tokens), block)

    def remove(self, block: B) -> None:
        del self._by_key[block.spec.key]
        # Blocks of equal tokens (of different pictures) stand side by side.
        self._sorted.pop(self._sorted.index(block, self._place(block.spec.tokens)))

    def alike(self, spec: BlockSpec) -> Iterator[tuple[B, int]]:
        """Blocks that share first tokens with `spec`, and how many, pictures included; those that share most first."""
        right = self._place(spec.tokens)
        left = right - 1
        waiting: list[tuple[int, int, B]] = []  # a picture that differs makes a block share less than its token ids do
        while True:
            before, after = self._run(left, spec), self._run(right, spec)
            while waiting and -waiting[0][0] >= max(before, after):
                run, _, block = heappop(waiting)
                yield block, -run
            if not before and not after:
                return
            index = left if before > after else right
            left, right = (left - 1, right) if before > after else (left, right + 1)
            run = shared(self._sorted[index].spec, spec.tokens, spec.spans)
            if run:
                heappush(waiting, (-run, index, self._sorted[index]))

    def _run(self, index: int, spec: BlockSpec) -> int:
        if not 0 <= index < len(self._sorted):
            return 0
        return common_run(self._sorted[index].spec.tokens, spec.tokens)

    def _place(self, tokens: bytes) -> int:
        return bisect_left(self._sorted, tokens, key=lambda block: block.spec.tokens)
