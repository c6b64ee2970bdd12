"""The memory enforcer: reads the footprint, judges it, publishes the limits and takes one step of the ladder at a time.

`Enforcer` is the judgement, one poll per call, with clock and readings handed in; `EnforcerThread` calls it, often when
something runs and rarely when nothing does, and at once when a load starts. Footprints trail what is freed by up to
four seconds, so freed bytes are credited until the footprint has followed or that time is over: a reading that is too
old is no reason to do more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from omlxd.daemon.footprint import MemoryProbe
from omlxd.daemon.ladder import Ladder, Relief, Relieved
from omlxd.engine.allocator import Allocator
from omlxd.engine.api import MemoryAction
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.limits import Ceilings, Level, MemoryLimits, MemoryPolicy, judge

PRESSED_S: Final = 0.25
BUSY_S: Final = 1.0
IDLE_S: Final = 10.0
EMPTY_S: Final = 30.0
TRAIL_S: Final = 4.0  # how long a footprint may take to follow what was freed
KEPT_ACTIONS: Final = 50

log = logging.getLogger(__name__)
Clock = Callable[[], float]
OnEvent = Callable[[MemoryAction, MemoryLimits], None]


class Trail:
    """Bytes that were freed and still stand in the footprint."""

    def __init__(self) -> None:
        self._expected = 0
        self._from = 0
        self._until = 0.0

    def add(self, nbytes: int, reading: int, now: float) -> None:
        """`nbytes` more were freed, which a reading of `reading` bytes does not show yet."""
        left = self.left(reading, now)
        if not left:
            self._until = now + TRAIL_S  # else the first one's: a reading that never follows is believed in the end
        self._expected = left + nbytes
        self._from = reading

    def left(self, reading: int, now: float) -> int:
        """What of it a reading still has to lose."""
        if now >= self._until:
            return 0
        return max(0, self._expected - max(0, self._from - reading))


class Enforcer:
    """One poll per call. On the enforcer's thread, but for `set_policy`, `expect`, `actions` and `read`."""

    def __init__(
        self,
        probe: MemoryProbe,
        guard: MemoryGuard,
        relief: Relief,
        policy: MemoryPolicy,
        *,
        allocator: Callable[[], Allocator],
        clock: Clock = time.monotonic,
        now: Clock = time.time,
        on_event: OnEvent = lambda action, limits: None,
    ) -> None:
        """`allocator` gives the one that is in force; `on_event` is called on the enforcer's thread."""
        self._probe = probe
        self._guard = guard
        self._ladder = Ladder(relief)
        self.policy = policy
        self._allocator = allocator
        self._clock = clock
        self._now = now
        self._on_event = on_event
        self._lock = threading.Lock()  # over the two trails and what they are compared with
        self._swap = threading.Lock()  # over the policy and the limits made of it
        self._returned = Trail()  # of MLX's pool, to the system: the footprint has to lose it
        self._freed = Trail()  # of arrays, to MLX's pool or the system: the footprint without the pool has to
        self._footprint = self._pool = self._without_pool = 0
        self._level = Level.OK
        self._waits: tuple[int, float] | None = None  # for the ledger to fall to so much, until then at most
        self._actions: deque[MemoryAction] = deque(maxlen=KEPT_ACTIONS)
        guard.limits = self._judged(self._measure(), Level.OK)

    # -- any thread ---------------------------------------------------------------------------------------------------

    @property
    def actions(self) -> Sequence[MemoryAction]:
        """What was done lately, oldest first."""
        return tuple(self._actions)

    def set_policy(self, policy: MemoryPolicy) -> None:
        """Holds when this returns: whoever changed it may count on it in the next request."""
        measured = self._measure()
        with self._swap:
            self.policy = policy
            self._guard.limits = self._judged(measured, self._level)

    def expect(self, nbytes: int) -> None:
        """So many bytes of arrays have just been freed; the footprint may show it later."""
        self._measure()
        self._expect(nbytes)

    def read(self) -> MemoryLimits:
        """A reading of now, judged; changes nothing."""
        return self._judged(self._measure(), self._level)

    # -- the poll -----------------------------------------------------------------------------------------------------

    def poll(self) -> float:
        """Reads, publishes, takes at most one step. Returns the seconds until the next poll."""
        measured, policy = self._measure(), self.policy
        limits = self._judged(measured, self._level)
        self._note_level(limits)
        if not self._still_waits(limits.ledger):
            done = self._ladder.step(limits)
            if done is not None:
                self._note_step(done, limits)
        with self._swap:
            if policy is not self.policy:  # it changed meanwhile
                limits = self._judged(measured, self._level)
            self._guard.limits = replace(limits, orders=self._ladder.orders)
        return self._delay(limits)

    def _delay(self, limits: MemoryLimits) -> float:
        if limits.level is Level.HARD or self._waits is not None:
            return PRESSED_S
        ledger = self._guard.ledger
        if limits.level is Level.SOFT or ledger.held(["kv", "chunk", "load"]):
            return BUSY_S
        return IDLE_S if ledger.held(["weights"]) else EMPTY_S

    def _measure(self) -> int:
        """The footprint without MLX's pool, and without what was freed and still shows."""
        footprint, pool, now = self._probe.footprint(), self._allocator().pool_bytes(), self._clock()
        with self._lock:
            if pool < self._pool:  # whoever returned it
                self._returned.add(self._pool - pool, self._footprint, now)
            self._footprint, self._pool = footprint, pool
            self._without_pool = footprint - pool - self._returned.left(footprint, now)
            return max(0, self._without_pool - self._freed.left(self._without_pool, now))

    def _expect(self, nbytes: int) -> None:
        with self._lock:
            self._freed.add(nbytes, self._without_pool, self._clock())

    def _judged(self, measured: int, before: Level) -> MemoryLimits:
        return judge(
            self._ceilings(measured),
            tier=self.policy.tier,
            measured=measured,
            ledger=self._guard.ledger.total(),
            before=before,
            orders=self._ladder.orders,
        )

    def _ceilings(self, measured: int) -> Ceilings:
        """Under pressure from outside only half of what is free counts, and nothing of it when that is critical."""
        share = {"normal": 1.0, "warn": 0.5, "critical": 0.0}[self._probe.pressure()]
        free = int(share * self._probe.available())
        pool = self._allocator().pool_bytes()
        total = self._probe.total()
        gpu = self._probe.gpu_limit()
        metal = self._allocator().working_set() if gpu is None else gpu
        return Ceilings(self.policy.static(total), measured + pool + free, metal)

    def _still_waits(self, ledger: int) -> bool:
        """Whether the last step has yet to show in the ledger: the next would be taken without need."""
        if self._waits is None:
            return False
        target, until = self._waits
        if ledger > target and self._clock() < until:
            return True
        self._waits = None
        return False

    def _note_level(self, limits: MemoryLimits) -> None:
        if limits.level is self._level:
            return
        before, self._level = self._level, limits.level
        self._note(MemoryAction(self._now(), f"level {limits.level.name}", f"was {before.name}", limits.usage), limits)

    def _note_step(self, done: Relieved, limits: MemoryLimits) -> None:
        if done.later:
            self._waits = (limits.ledger - done.bytes // 2, self._clock() + TRAIL_S)
        from_pool = max(0, self._pool - self._allocator().pool_bytes())  # the next measure notices that by itself
        self._expect(max(0, done.bytes - from_pool))
        why = f"{limits.usage} bytes used, {limits.binding} limit, marks at {limits.soft} and {limits.hard}"
        self._note(MemoryAction(self._now(), done.what, why, done.bytes), limits)

    def _note(self, action: MemoryAction, limits: MemoryLimits) -> None:
        self._actions.append(action)
        log.info("memory: %s (%s; %d bytes)", action.what, action.why, action.bytes)
        self._on_event(action, limits)


class EnforcerThread:
    """Polls until stopped. Started, woken and stopped on any thread."""

    def __init__(self, poll: Callable[[], float]) -> None:
        self._poll = poll
        self._changed = threading.Condition()
        self._is_awake = self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="memory-enforcer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Polls at once."""
        with self._changed:
            self._is_awake = True
            self._changed.notify()

    def stop(self) -> None:
        """Ends the thread; waits for the poll that runs, unless called by it."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(TRAIL_S)

    def _run(self) -> None:
        while not self._is_stopped:
            try:
                delay = self._poll()
            except Exception:  # the top of this thread: a reading that fails must not leave the daemon unguarded
                log.exception("a memory reading failed; the next one comes in %g s", BUSY_S)
                delay = BUSY_S
            with self._changed:
                self._changed.wait_for(lambda: self._is_awake or self._is_stopped, delay)
                self._is_awake = False
