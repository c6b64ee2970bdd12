"""Memory that a model left behind when it was unloaded: who holds it, as an entry of the ledger, until it has gone.

`remains_of` is asked on the engine thread, right after the engine has let go; `Unreturned` lives on the event loop.
"""

from __future__ import annotations

import gc
import weakref
from types import FrameType
from typing import Any

from omlxd.engine.inbox import Remains
from omlxd.engine.ledger import Ledger, Reservation


def remains_of(model: weakref.ref[Any]) -> Remains | None:
    """What is left of a model that should be gone, named by the kinds of objects that refer to it. None: nothing."""
    left = model()
    if left is None:
        return None
    referrers = (each for each in gc.get_referrers(left) if not isinstance(each, FrameType))
    holder = ", ".join(sorted({type(each).__qualname__ for each in referrers})) or "something in a library"
    return Remains(holder, lambda: model() is None)


class Unreturned:
    """Every unloaded model that something still holds."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._left: list[tuple[Remains, Reservation]] = []

    def note(self, model: str, nbytes: int, remains: Remains) -> None:
        """The model was unloaded, and its bytes have not come back."""
        reservation = self._ledger.hold(f"{model}, held by {remains.holder}", "unreturned", nbytes)
        self._left.append((remains, reservation))

    def look(self) -> None:
        """Strikes out what has gone since."""
        for remains, reservation in self._left:
            if remains.is_gone():
                reservation.release()
        self._left = [(remains, reservation) for remains, reservation in self._left if not remains.is_gone()]
