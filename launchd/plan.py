"""What `install`, `start`, `stop`, `restart` and `uninstall` come to: steps, decided before any is taken.

Pure: `launchd.service` finds the situation out and takes the steps, and --dry-run only shows them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omlxd.launchd.agent import Installed
from omlxd.launchd.printed import Printed


@dataclass(frozen=True, slots=True)
class Situation:
    """How things stand. `domain` is where the service would be loaded, `loaded` where it is, `installed` its file."""

    domain: str
    loaded: Mapping[str, Printed]
    installed: Installed | None

    @property
    def printed(self) -> Printed:
        """The one that runs, as the lock lets one of two; else any that is loaded; else nothing known."""
        running = [printed for printed in self.loaded.values() if printed.pid is not None]
        return next(iter([*running, *self.loaded.values()]), Printed())

    @property
    def is_current(self) -> bool:
        """Whether just what the file says is loaded, and where it should be."""
        return set(self.loaded) == {self.domain} and self.is_as_written(self.loaded[self.domain])

    def is_as_written(self, printed: Printed) -> bool:
        """Whether launchd has what the file says. Where launchd's words cannot be read, it has not."""
        installed = self.installed
        if installed is None:
            return False
        variables = {name: printed.environment.get(name) for name in installed.environment}
        return (
            printed.path == installed.path
            and tuple(printed.arguments) == tuple(installed.arguments)
            and variables == installed.environment
        )


@dataclass(frozen=True, slots=True)
class Write:
    """Put a property list in its place."""

    path: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Remove:
    """Take a file away, if it is there."""

    path: str


@dataclass(frozen=True, slots=True)
class Enable:
    """Lift an earlier `disable`."""

    domain: str


@dataclass(frozen=True, slots=True)
class Bootout:
    """Unload, and wait for the end."""

    domain: str
    exit_timeout_s: float


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Load."""

    domain: str
    path: str


@dataclass(frozen=True, slots=True)
class Kickstart:
    """Start what is loaded."""

    domain: str
    kill: bool


Step = Write | Remove | Enable | Bootout | Bootstrap | Kickstart


def install(now: Situation, path: str, content: bytes, *, exit_timeout_s: float) -> Sequence[Step]:
    """Nothing where all of it is in place.

    The file is replaced while nothing is loaded, so that launchd never has another definition than the file.
    """
    if now.installed is not None and now.installed.content == content and now.is_current:
        return start(now)
    waiting_s = max(exit_timeout_s, _exit_timeout_s(now))
    return [
        *(Bootout(domain, waiting_s) for domain in now.loaded),
        Write(path, content),
        Enable(now.domain),
        Bootstrap(now.domain, path),
    ]


def start(now: Situation) -> Sequence[Step]:
    """`now.installed` must be there. One that waits for its first client on demand is left to wait."""
    installed = now.installed
    if installed is None:
        return []
    if not now.is_current:
        return [*stop(now), Enable(now.domain), Bootstrap(now.domain, installed.path)]
    if now.printed.pid is not None or installed.on_demand:
        return []
    return [Kickstart(now.domain, kill=False)]


def stop(now: Situation) -> Sequence[Step]:
    return [Bootout(domain, _exit_timeout_s(now)) for domain in now.loaded]


def restart(now: Situation) -> Sequence[Step]:
    """launchd keeps the definition in memory: a plain restart serves only where the file is what it has."""
    if now.is_current and now.printed.pid is not None:
        return [Kickstart(now.domain, kill=True)]
    return start(now)


def uninstall(now: Situation) -> Sequence[Step]:
    if now.installed is None:
        return stop(now)
    socket = now.installed.environment.get("OMLXD_SOCKET")
    # launchd leaves the file of a socket behind, and has failed to replace one that it found.
    left = [Remove(socket)] if now.installed.on_demand and socket else []
    return [*stop(now), Remove(now.installed.path), *left]


def _exit_timeout_s(now: Situation) -> float:
    return 30.0 if now.installed is None else float(now.installed.exit_timeout_s)


def described(step: Step, label: str) -> str:
    """A step as the command that does it."""
    match step:
        case Write(path, content):
            return f"write {path} (mode 0600):\n{content.decode()}".rstrip()
        case Remove(path):
            return f"rm -f {path}"
        case Enable(domain):
            return f"launchctl enable {domain}/{label}"
        case Bootout(domain, exit_timeout_s):
            return f"launchctl bootout {domain}/{label}    # and wait up to {exit_timeout_s:.0f} s until it has gone"
        case Bootstrap(domain, path):
            return f"launchctl bootstrap {domain} {path}"
        case Kickstart(domain, kill):
            return f"launchctl kickstart {'-k ' if kill else ''}{domain}/{label}"
