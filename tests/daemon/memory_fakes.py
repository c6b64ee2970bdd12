"""Readings and steps that say what a test wants: a machine's memory in a few numbers, and a relief that works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from omlxd.daemon.enforcer import Enforcer
from omlxd.daemon.footprint import Pressure
from omlxd.daemon.ladder import Relieved
from omlxd.engine.api import MemoryAction
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.ledger import Reservation
from omlxd.engine.limits import Level, MemoryLimits, MemoryPolicy


@dataclass
class FakeMachine:
    """A machine with a daemon on it; `pool` is MLX's. Implements MemoryProbe and Allocator. A clock moved by hand."""

    held: int = 0
    pool: int = 0
    total_bytes: int = 10_000
    free: int = 10_000
    metal: int | None = None
    gpu: int | None = None  # what somebody has set
    pressed: Pressure = "normal"
    now: float = 0.0
    shown: Callable[[int], int] = lambda real: real  # what the footprint says when the truth is `real`

    def footprint(self) -> int:
        return self.shown(self.held + self.pool)

    def total(self) -> int:
        return self.total_bytes

    def available(self) -> int:
        return self.free

    def gpu_limit(self) -> int | None:
        return self.gpu

    def pressure(self) -> Pressure:
        return self.pressed

    def pool_bytes(self) -> int:
        return self.pool

    def return_pool(self) -> int:
        returned, self.pool = self.pool, 0
        return returned

    def working_set(self) -> int | None:
        return self.metal

    def clock(self) -> float:
        return self.now


@dataclass
class FakeRelief:
    """What there is to relieve, in bytes; `done` tells in which order it went. `slow`: unloading takes its time."""

    machine: FakeMachine
    hot: int = 0
    idle: list[int] = field(default_factory=list)
    low: list[int] = field(default_factory=list)
    prefills: list[int] = field(default_factory=list)
    slow: bool = False
    done: list[str] = field(default_factory=list)

    def shrink_hot(self, nbytes: int) -> Relieved | None:
        if not self.hot:
            return None
        freed = min(nbytes, self.hot)
        self.hot -= freed
        self.machine.held -= freed
        return self._did("hot", freed)

    def return_pool(self) -> Relieved | None:
        return self._did("pool", self.machine.return_pool()) if self.machine.pool else None

    def unload_idle(self) -> Relieved | None:
        return self._take("unload", self.idle, later=self.slow)

    def preempt(self) -> Relieved | None:
        return self._take("preempt", self.low)

    def fail_prefill(self) -> Relieved | None:
        return self._take("fail", self.prefills)

    def _take(self, what: str, holders: list[int], *, later: bool = False) -> Relieved | None:
        if not holders:
            return None
        nbytes = holders.pop(0)
        if not later:
            self.machine.held -= nbytes
        return self._did(what, nbytes, later=later)

    def _did(self, what: str, nbytes: int, *, later: bool = False) -> Relieved:
        self.done.append(what)
        return Relieved(what, nbytes, later)


class Bench:
    """An enforcer over a fake machine with a limit of 1000 bytes: marks at 900 and 960, and 980 to abort."""

    def __init__(self, machine: FakeMachine | None = None, **relief: object) -> None:
        self.machine = machine or FakeMachine()
        self.relief = FakeRelief(self.machine, **relief)  # type: ignore[arg-type]
        self.guard = MemoryGuard()
        self.events: list[tuple[MemoryAction, MemoryLimits]] = []
        self.enforcer = Enforcer(
            self.machine,
            self.guard,
            self.relief,
            MemoryPolicy("custom", 1000),
            allocator=lambda: self.machine,
            clock=self.machine.clock,
            now=lambda: 1e9 + self.machine.now,
            on_event=lambda action, limits: self.events.append((action, limits)),
        )

    def hold(self, kind: str, nbytes: int) -> Reservation:
        return self.guard.ledger.hold("m", kind, nbytes)  # type: ignore[arg-type]

    def poll(self, *readings: int, every: float = 0.25) -> Level:
        """Polls once for each reading of what is held, or once as it stands; the clock moves on after each."""
        for held in readings or (self.machine.held,):
            self.machine.held = held
            self.enforcer.poll()
            self.machine.now += every
        return self.guard.limits.level
