"""The tensors of one engine's pictures, from their making to the end of the requests that have them.

Lives on the event loop, where requests begin and end; knows bytes and owners, and of the tensors nothing else. Requests
that wait for a row hold theirs already, often many requests the same ones, which are counted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omlxd.engine.ledger import Ledger, Reservation

if TYPE_CHECKING:
    from omlxd.engine.vision_inputs import PictureInput, Tensors


class PictureTensors:
    """Keeps the ledger's entry of what requests have of pictures."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self._name = name
        self._ledger = ledger
        self._entry: Reservation | None = None
        self._held: dict[int, list[Tensors]] = {}  # by identity: once for every request that has them

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
        return sum(tensor.nbytes for tensors, *_ in self._held.values() for tensor in tensors.values())

    def _count(self) -> None:
        nbytes = self.nbytes
        if self._entry is not None and not nbytes:
            self._entry.release()
            self._entry = None
        elif self._entry is not None:
            self._entry.resize(nbytes)
        elif nbytes:
            self._entry = self._ledger.hold(self._name, "pictures", nbytes)
