"""What this process occupies and what the machine has left: one protocol, and the reading that comes out of it.

Owns no numbers; each platform has a reader of its own (`footprint_darwin`, `footprint_linux`), and tests have one that
says what they want. Read by the memory-enforcer thread, a few times a second at most; every method is a system call or
two and none blocks.
"""

from __future__ import annotations

import sys
from typing import Literal, Protocol

Pressure = Literal["normal", "warn", "critical"]


class MemoryProbe(Protocol):
    """Readings in bytes. Any thread may take them."""

    def footprint(self) -> int:
        """Dirty memory of this process, compressed and swapped parts included; what the system would kill it for."""
        ...

    def total(self) -> int:
        """The memory that this process could ever have: the machine's, or its container's if that is less."""
        ...

    def available(self) -> int:
        """What is free or would be given up at once, for this process, now."""
        ...

    def gpu_limit(self) -> int | None:
        """What somebody has allowed the GPU; None where the system chooses, or where there is none."""
        ...

    def pressure(self) -> Pressure:
        """How the system as a whole is doing, by its own judgement."""
        ...


def platform_probe() -> MemoryProbe:
    """The reader of this machine."""
    if sys.platform == "darwin":
        from omlxd.daemon.footprint_darwin import DarwinProbe

        return DarwinProbe()
    from omlxd.daemon.footprint_linux import LinuxProbe

    return LinuxProbe()
