"""Settings that change while the daemon runs: what differs from what is in force, and who takes it up.

Owns the list of keys in force. Lives on the event loop, except `read`, which reads the file and may run on any thread.
Parts of the daemon say which keys they take up; a key that nobody takes up needs a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from omlxd.daemon import settings
from omlxd.daemon.setting_types import Value
from omlxd.daemon.settings import Settings
from omlxd.engine.api import Reloaded

Apply = Callable[[Settings], None]


class LiveSettings:
    """The settings that the daemon started with, and what became of them since."""

    def __init__(self, started: Settings, read: Callable[[], Settings]) -> None:
        self.started = started
        self.read = read  # the file and the environment, as at the start; raises ConfigError
        self._in_force: dict[str, Value] = dict(settings.values(started))
        self._takers: dict[str, Apply] = {}

    def taken_up_by(self, apply: Apply, *keys: str) -> None:
        """`apply` is called with the new settings after one of `keys` has changed; it takes up those keys alone."""
        for key in keys:
            self._takers[key] = apply

    def apply(self, new: Settings) -> Reloaded:
        """Hands every change to whoever takes it up. What needs a restart is named each time until there was one."""
        values = settings.values(new)
        changed = [key for key, value in values.items() if value != self._in_force[key]]
        live = [key for key in changed if key in self._takers]
        for apply in dict.fromkeys(self._takers[key] for key in live):
            apply(new)
        self._in_force |= {key: values[key] for key in live}
        return Reloaded(live, [key for key in changed if key not in self._takers])


def described(reloaded: Reloaded) -> str:
    """One line for the log."""
    parts: Mapping[str, list[str]] = {
        "now in force": list(reloaded.applied),
        "only after a restart": list(reloaded.needs_restart),
    }
    return "; ".join(f"{what}: {', '.join(keys)}" for what, keys in parts.items() if keys) or "nothing has changed"
