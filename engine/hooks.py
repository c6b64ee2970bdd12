"""Who may change a library's class: one backend at a time, claimed before anything is changed.

Some backends (speculative ones above all) can only work by putting a hook on a class of mlx-lm's or mlx-vlm's, which
every model of that architecture in this process would then meet. So a model's hooks are claimed as its load begins,
all or none, and installed only then; the last model that has one takes it away when it goes. Called on the loader
thread and on the event loop: one lock is held over the changes themselves, which are assignments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omlxd.engine.api import Unsupported


@dataclass(frozen=True, slots=True)
class Hook:
    """What `backend` changes about a library's class: how it is put there, and how it is taken away."""

    cls: type
    backend: str
    install: Callable[[], None]
    remove: Callable[[], None]


class HookConflict(Unsupported):
    """Another backend has its hook on the class; nothing has been changed."""

    def __init__(self, hook: Hook, holder: str) -> None:
        name = f"{hook.cls.__module__}.{hook.cls.__qualname__}"
        super().__init__(
            f"{hook.backend} on {name}", f"{holder} has its hook on that class; unload the models that use it first"
        )
        self.holder = holder


class Claim:
    """One model's hooks, until `release`."""

    def __init__(self, registry: HookRegistry, hooks: Sequence[Hook]) -> None:
        self._registry = registry
        self._hooks = hooks

    def release(self) -> None:
        """Gives the classes back; hooks that no other model has are removed. Idempotent."""
        hooks, self._hooks = self._hooks, ()
        self._registry.give_back(hooks)


@dataclass(slots=True)
class _Installed:
    hook: Hook
    models: int


class HookRegistry:
    """Which backend has its hook on which class, and for how many models."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._installed: dict[type, _Installed] = {}

    def claim(self, hooks: Sequence[Hook]) -> Claim:
        """Claims the classes of one model's hooks, then installs those that are not there yet.

        Raises HookConflict, before anything is changed, where another backend has one of them; and what a hook raises
        as it is installed, after those before it have been taken back.
        """
        with self._lock:
            for hook in hooks:
                there = self._installed.get(hook.cls)
                if there is not None and there.hook.backend != hook.backend:
                    raise HookConflict(hook, there.hook.backend)
            done: list[Hook] = []
            try:
                for hook in hooks:
                    self._add(hook)
                    done.append(hook)
            except BaseException:
                self._drop(done)
                raise
        return Claim(self, hooks)

    def holder(self, cls: type) -> str | None:
        """The backend that has its hook on the class."""
        with self._lock:
            there = self._installed.get(cls)
        return None if there is None else there.hook.backend

    def give_back(self, hooks: Sequence[Hook]) -> None:
        """For Claim."""
        with self._lock:
            self._drop(hooks)

    def _add(self, hook: Hook) -> None:
        there = self._installed.get(hook.cls)
        if there is None:
            hook.install()
            self._installed[hook.cls] = _Installed(hook, 1)
        else:
            there.models += 1

    def _drop(self, hooks: Sequence[Hook]) -> None:
        for hook in reversed(hooks):
            there = self._installed[hook.cls]
            there.models -= 1
            if not there.models:
                del self._installed[hook.cls]
                there.hook.remove()
