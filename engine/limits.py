"""The memory limits as one frozen value, and the pure functions that make it: ceilings, marks, level.

Made by the enforcer once per poll and swapped as a whole; any thread may hold one. Takes no readings of its own:
whoever calls brings the numbers. Bytes throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

Tier = Literal["safe", "balanced", "aggressive", "custom"]
Binding = Literal["static", "dynamic", "metal"]

# What a tier leaves to everything else on the machine: a share of its memory, but so many bytes at least.
_RESERVES: dict[str, tuple[float, int]] = {
    "safe": (0.40, 8 * 2**30),
    "balanced": (0.25, 4 * 2**30),
    "aggressive": (0.10, 2 * 2**30),
}
_MOST_RESERVED = 0.5  # of a small machine the daemon may have this share all the same

# Percent of the limit. Work is admitted up to SOFT; beyond it something was larger than foreseen, or the limit fell. A
# level is left only below its low mark, so that it does not flicker.
SOFT, SOFT_LOW = 90, 85
HARD, HARD_LOW = 96, 92
ABORT = 98


class Level(IntEnum):
    """How far up the marks the use of memory stands."""

    OK = 0
    SOFT = 1
    HARD = 2


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What each kind of limit allows. `metal` is None where there is no GPU or it has not been asked yet."""

    static: int
    dynamic: int
    metal: int | None = None

    @property
    def steady(self) -> int:
        """Without the dynamic one, which jumps with what other programs do."""
        return self.static if self.metal is None else min(self.static, self.metal)

    @property
    def lowest(self) -> int:
        return min(self.steady, self.dynamic)

    @property
    def binding(self) -> Binding:
        """The lowest; of equal ones the one that a setting can change."""
        if self.static <= self.lowest:
            return "static"
        return "metal" if self.metal is not None and self.metal <= self.lowest else "dynamic"


@dataclass(frozen=True, slots=True)
class Orders:
    """What the ladder asks of every engine until the pressure has passed.

    `chunk_share` is what a prefill turn may be of its usual size. `exhausted`: nothing more can be freed, so that
    whoever waits for memory waits in vain.
    """

    chunk_share: float = 1.0
    admits: bool = True
    exhausted: bool = False


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """One reading, judged: `measured` is the footprint without MLX's reusable pool, `ledger` the ledger's total."""

    soft: int
    hard: int
    abort: int
    level: Level
    ceilings: Ceilings
    tier: Tier
    measured: int
    ledger: int
    orders: Orders = Orders()

    @property
    def usage(self) -> int:
        return max(self.measured, self.ledger)

    @property
    def binding(self) -> Binding:
        return self.ceilings.binding

    @property
    def steady_soft(self) -> int:
        """Up to where work could ever be admitted: the soft mark without the ceiling that jumps."""
        return self.ceilings.steady * SOFT // 100

    def usage_at(self, ledger: int) -> int:
        """The use of memory when the ledger has come to `ledger` since the reading."""
        return max(ledger, self.measured + ledger - self.ledger)


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """What the user wants: a tier, or a number of bytes in its place."""

    tier: Tier = "balanced"
    limit_bytes: int | None = None

    def static(self, total: int) -> int:
        """The ceiling for a machine with `total` bytes."""
        if self.limit_bytes is not None:
            return min(self.limit_bytes, total)
        share, least = _RESERVES[self.tier]
        return total - int(min(max(total * share, least), total * _MOST_RESERVED))


def judge(
    ceilings: Ceilings, *, tier: Tier, measured: int, ledger: int, before: Level, orders: Orders = Orders()
) -> MemoryLimits:
    """The limits that follow from a reading, and the level that it comes to after the level `before`."""
    limit = ceilings.lowest
    return MemoryLimits(
        soft=limit * SOFT // 100,
        hard=limit * HARD // 100,
        abort=ceilings.steady * ABORT // 100,
        level=level_of(max(measured, ledger), limit, before),
        ceilings=ceilings,
        tier=tier,
        measured=measured,
        ledger=ledger,
        orders=orders,
    )


def level_of(usage: int, limit: int, before: Level) -> Level:
    """The level of `usage`; one that was entered lasts until the use is below its low mark."""
    percent = 100 * usage
    if percent > limit * HARD or (before is Level.HARD and percent > limit * HARD_LOW):
        return Level.HARD
    if percent > limit * SOFT or (before is not Level.OK and percent > limit * SOFT_LOW):
        return Level.SOFT
    return Level.OK


_ENDLESS = 1 << 60
UNLIMITED = judge(Ceilings(_ENDLESS, _ENDLESS), tier="custom", measured=0, ledger=0, before=Level.OK)
