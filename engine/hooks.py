"""Who may change a library's class: one backend at a time, claimed before anything is changed.

Some backends (speculative ones above all) can only work by putting a hook on a class of mlx-lm's or mlx-vlm's, which
every model of that architecture in this process would then meet. A claim is made before the hook is installed, so that
two backends never change one class behind each other's back. Called on the loader thread and on engine threads; one
lock guards a dictionary.
"""

from __future__ import annotations

import threading
from types import TracebackType

from omlxd.engine.api import InvariantError, Unsupported


class HookConflict(Unsupported):
    """Another backend has its hook on the class; nothing has been changed."""

    def __init__(self, cls: type, holder: str, wanted_by: str) -> None:
        super().__init__(
            f"{wanted_by} on {_name(cls)}", f"{holder} has its hook on that class; unload the models that use it first"
        )
        self.holder = holder


class Claim:
    """One model's right to a class, until `release`. Also a context manager."""

    def __init__(self, registry: HookRegistry, cls: type, backend: str, *, is_first: bool) -> None:
        """`is_first`: the hook is to be installed now; no other model of this backend has it there."""
        self.is_first = is_first
        self._registry = registry
        self._cls = cls
        self._backend = backend
        self._is_held = True

    def release(self) -> bool:
        """Gives the claim back; whether it was the last one, so that the hook has to go. Idempotent."""
        was_held, self._is_held = self._is_held, False
        return was_held and self._registry.give_back(self._cls, self._backend)

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class HookRegistry:
    """Which backend has which class, and for how many models."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[type, tuple[str, int]] = {}

    def claim(self, cls: type, backend: str) -> Claim:
        """The class for `backend`: again for the backend that has it, HookConflict for any other."""
        with self._lock:
            holder, count = self._held.get(cls, (backend, 0))
            if holder != backend:
                raise HookConflict(cls, holder, backend)
            self._held[cls] = (backend, count + 1)
        return Claim(self, cls, backend, is_first=count == 0)

    def holder(self, cls: type) -> str | None:
        with self._lock:
            held = self._held.get(cls)
        return None if held is None else held[0]

    def give_back(self, cls: type, backend: str) -> bool:
        """For Claim. Raises InvariantError for a class that the backend does not hold."""
        with self._lock:
            holder, count = self._held.get(cls, ("nobody", 0))
            if holder != backend:
                raise InvariantError(f"{backend} gives back {_name(cls)}, which {holder} holds")
            if count == 1:
                del self._held[cls]
            else:
                self._held[cls] = (backend, count - 1)
            return count == 1


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
