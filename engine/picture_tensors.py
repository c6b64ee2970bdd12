"""The tensors of one engine's pictures, from their making to the end of the requests that have them, and some longer.

Lives on the event loop, where requests begin and end; knows bytes and owners, and of the tensors nothing else. Requests
that wait for a row hold theirs already, often many requests the same ones, which are counted once. What a processor has
made of a picture alone is kept under a budget of bytes: a conversation shows its pictures again in every turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omlxd.engine.ledger import Ledger, Reservation

if TYPE_CHECKING:
    from omlxd.engine.vision_inputs import Apart, PictureInput, Tensors


class PictureTensors:
    """The owner of what requests have of pictures, of what is kept of them, and of the ledger's entry of both."""

    def __init__(self, name: str, ledger: Ledger, max_bytes: int = 0) -> None:
        """`max_bytes` is for what is kept."""
        self._name = name
        self._ledger = ledger
        self._entry: Reservation | None = None
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Apart] = OrderedDict()
        self.kept_bytes = 0  # read by other threads, too
        self._held: dict[int, list[Tensors]] = {}  # by identity: once for every request that has them

    def kept(self, digest: bytes) -> Apart | None:
        """What is kept of a picture, which has been used then."""
        found = self._kept.get(digest)
        if found is not None:
            self._kept.move_to_end(digest)
        return found

    def keep(self, digest: bytes, apart: Apart) -> Apart:
        """Keeps what has been made of a picture, if it fits at all. Returns it, or what was there already."""
        found = self._kept.setdefault(digest, apart)
        if found is apart:
            self.kept_bytes += apart.nbytes
            self._shrink(self._max_bytes)
        return found

    def drop_kept(self) -> None:
        """Memory is short, or the engine has ended."""
        self._shrink(0)

    def _shrink(self, nbytes: int) -> None:
        """The least recently used go first; the newest one goes at once if it alone is too large."""
        newest = next(reversed(self._kept), None)
        if newest is not None and self._kept[newest].nbytes > nbytes:
            self.kept_bytes -= self._kept.pop(newest).nbytes
        while self.kept_bytes > nbytes:
            _, gone = self._kept.popitem(last=False)
            self.kept_bytes -= gone.nbytes
        self._count()

    @contextmanager
    def holding(self, pictures: Sequence[PictureInput]) -> Iterator[None]:
        """Has a request's tensors in the ledger until the block is left. They are there already: none are refused."""
        for picture in pictures:
            self._held.setdefault(id(picture.tensors), []).append(picture.tensors)
        self._count()
        try:
            yield
        finally:
            for picture in pictures:
                self._let_go(id(picture.tensors))
            self._count()

    def _let_go(self, key: int) -> None:
        self._held[key].pop()
        if not self._held[key]:
            del self._held[key]

    @property
    def nbytes(self) -> int:
        held = {key: tensors for key, (tensors, *_) in self._held.items()}
        each = held | {id(apart.tensors): apart.tensors for apart in self._kept.values()}
        return sum(tensor.nbytes for tensors in each.values() for tensor in tensors.values())

    def _count(self) -> None:
        nbytes = self.nbytes
        if self._entry is not None and not nbytes:
            self._entry.release()
            self._entry = None
        elif self._entry is not None:
            self._entry.resize(nbytes)
        elif nbytes:
            self._entry = self._ledger.hold(self._name, "pictures", nbytes)
