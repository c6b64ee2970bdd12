"""The way into an engine thread and its last word: commands, and the condition it waits on when it has nothing to do.

Any thread may put commands in; the engine thread alone takes them out, all at once, at the start of a step. Nothing
waits for room: how many requests may be under way is decided before `put`, by the handle that counts them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from omlxd.engine.api import OmlxError
from omlxd.engine.job import Job

if TYPE_CHECKING:
    from omlxd.cache.prefix import PrefixCache


@dataclass(frozen=True, slots=True)
class Submit:
    """Run this."""

    job: Job


@dataclass(frozen=True, slots=True)
class Abort:
    """End this request, if it is still there; its client is told that it was cancelled."""

    id: str
    reason: str | None


SHORT_OF_MEMORY = "preempted: memory is short"


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take this request out of its place, if it has one, back into the line; it goes on from what is stored."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """End this request, if it is still there, with this error."""

    id: str
    error: OmlxError


@dataclass(frozen=True, slots=True)
class Ask:
    """Call this between two steps with the model's prefix cache, None where it has none. It tells the answer itself.

    It must be quick, as every row waits for it, and must not raise.
    """

    call: Callable[[PrefixCache | None], None]


@dataclass(frozen=True, slots=True)
class Deliver:
    """Call this between two steps: it hands over what another thread has done for the engine. Quick, as for `Ask`."""

    call: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Close:
    """End everything and the thread with it."""

    why: Literal["unloaded", "shutdown"]


Command = Submit | Abort | Preempt | Refuse | Ask | Deliver | Close


@dataclass(frozen=True, slots=True)
class Remains:
    """A model that should be gone: who has it, and whether it has gone since."""

    holder: str
    is_gone: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Closed:
    """What the thread leaves behind: why it ended, if not by command, and the bytes of arrays that went with it.

    `remains` is there when something still has the model.
    """

    failure: str | None
    freed_bytes: int
    remains: Remains | None = None


class Inbox:
    """Commands on their way to the engine thread."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._arrived = threading.Condition()

    def put(self, command: Command) -> None:
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def take(self, *, wait: bool, timeout_s: float | None = None) -> Sequence[Command]:
        """Everything that has arrived, in order. With `wait`, sleeps until something does, or for so long."""
        with self._arrived:
            if wait:
                self._arrived.wait_for(lambda: bool(self._commands), timeout_s)
            taken, self._commands = self._commands, []
            return taken
