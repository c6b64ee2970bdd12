"""A prefix tree's nodes as values, for people to look at. For any thread."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Node:
    """A block or checkpoint in one tier or both. `tokens` are packed; `last_used`, in Unix seconds, is the disk's."""

    key: str
    parent: str
    start: int
    tokens: bytes
    is_checkpoint: bool
    nbytes: int
    pins: int
    hot: bool = False
    ssd: bool = False
    last_used: float | None = None

    def also_on_disk(self, node: Node) -> Node:
        """This one of the memory's, with what the disk says of the same."""
        return replace(self, ssd=True, last_used=node.last_used, pins=self.pins + node.pins)
