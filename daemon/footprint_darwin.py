"""macOS's readings, by ctypes: phys_footprint, the pages that can be had, the pressure level and the GPU's limit.

Owns the layout of three kernel structures, of which only the fields read here have names; tests hold it to the offsets
of <sys/resource.h> and <mach/vm_statistics.h>. `proc_pid_rusage` takes no lock on the process's memory map, so it does
not stall behind a large mapping as `task_info` does. A footprint of RSS would be wrong both ways: it counts clean
files and misses what is compressed.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final, Literal

RUSAGE_INFO_V0: Final = 0
RUSAGE_INFO_V4: Final = 4
HOST_VM_INFO64: Final = 4
RUSAGE_BYTES: Final = 464  # the largest flavour's: a newer system may fill in more than was asked for
_PRESSURES: Final[dict[int, Literal["normal", "warn", "critical"]]] = {1: "normal", 2: "warn", 4: "critical"}


class RusageInfo(ctypes.Structure):
    """`rusage_info_v4`. Up to the footprint all flavours agree."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("times", ctypes.c_uint64 * 5),  # user, system, wakeups of two kinds, page-ins
        ("wired_size", ctypes.c_uint64),
        ("resident_size", ctypes.c_uint64),
        ("phys_footprint", ctypes.c_uint64),
        ("between", ctypes.c_uint64 * 20),
        ("lifetime_max_phys_footprint", ctypes.c_uint64),
        ("counters", ctypes.c_uint64 * 4),
        ("interval_max_phys_footprint", ctypes.c_uint64),
        ("runnable_time", ctypes.c_uint64),
    )


class VmStatistics(ctypes.Structure):
    """`vm_statistics64`, in pages."""

    _pack_ = 8
    _fields_ = (
        ("free_count", ctypes.c_uint32),
        ("active_count", ctypes.c_uint32),
        ("inactive_count", ctypes.c_uint32),
        ("wire_count", ctypes.c_uint32),
        ("events", ctypes.c_uint64 * 9),
        ("purgeable_count", ctypes.c_uint32),
        ("speculative_count", ctypes.c_uint32),
        ("compressor_events", ctypes.c_uint64 * 4),
        ("compressor_page_count", ctypes.c_uint32),
        ("throttled_count", ctypes.c_uint32),
        ("external_page_count", ctypes.c_uint32),
        ("internal_page_count", ctypes.c_uint32),
        ("total_uncompressed_pages_in_compressor", ctypes.c_uint64),
    )


VM_COUNT: Final = ctypes.sizeof(VmStatistics) // 4  # host_statistics64 counts in 32-bit words


class DarwinProbe:
    """Implements `MemoryProbe` with macOS's libSystem, which every process has loaded."""

    def __init__(self, library: str | None = None) -> None:
        """`library` is for tests. Raises OSError where the system lacks what is needed."""
        self._system = ctypes.CDLL(library, use_errno=True)
        self._declare()
        self._host = self._system.mach_host_self()  # a port of its own each time it is called: once is enough
        self._flavour = RUSAGE_INFO_V4
        self._total = self._sysctl("hw.memsize", ctypes.c_uint64())
        self._page_bytes = self._sysctl("hw.pagesize", ctypes.c_uint64())

    def footprint(self) -> int:
        return int(self._rusage().phys_footprint)

    def total(self) -> int:
        return self._total

    def available(self) -> int:
        """Free pages, purgeable ones, and those of files: the system drops these without writing anything."""
        pages = VmStatistics()
        count = ctypes.c_uint32(VM_COUNT)
        code = self._system.host_statistics64(self._host, HOST_VM_INFO64, ctypes.byref(pages), ctypes.byref(count))
        if code != 0:
            raise OSError(code, f"host_statistics64 answers {code}")
        return int(pages.free_count + pages.purgeable_count + pages.external_page_count) * self._page_bytes

    def pressure(self) -> Literal["normal", "warn", "critical"]:
        level = self._sysctl("kern.memorystatus_vm_pressure_level", ctypes.c_int32())
        return _PRESSURES.get(level, "critical")

    def gpu_limit(self) -> int | None:
        """`iogpu.wired_limit_mb`, which is 0 where the system chooses. MLX read it once; it may change at any time."""
        try:
            megabytes = self._sysctl("iogpu.wired_limit_mb", ctypes.c_int32())
        except OSError:
            return None  # a machine, most likely a virtual one, without such a GPU
        return megabytes * 2**20 or None

    def _declare(self) -> None:
        system = self._system
        system.proc_pid_rusage.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        system.proc_pid_rusage.restype = ctypes.c_int
        system.sysctlbyname.argtypes = [
            ctypes.c_char_p,
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_size_t),
            ctypes.c_void_p,
            ctypes.c_size_t,
        ]
        system.sysctlbyname.restype = ctypes.c_int
        system.mach_host_self.argtypes = []
        system.mach_host_self.restype = ctypes.c_uint32
        system.host_statistics64.argtypes = [
            ctypes.c_uint32,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_uint32),
        ]
        system.host_statistics64.restype = ctypes.c_int

    def _rusage(self) -> RusageInfo:
        buffer = ctypes.create_string_buffer(RUSAGE_BYTES)
        if self._system.proc_pid_rusage(os.getpid(), self._flavour, buffer) != 0:
            code = ctypes.get_errno()
            if code != errno.EINVAL or self._flavour == RUSAGE_INFO_V0:
                raise OSError(code, f"proc_pid_rusage: {os.strerror(code)}")
            self._flavour = RUSAGE_INFO_V0
            return self._rusage()
        return RusageInfo.from_buffer_copy(buffer)

    def _sysctl(self, name: str, value: ctypes.c_uint64 | ctypes.c_int32) -> int:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        if self._system.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"sysctl {name}: {os.strerror(code)}")
        return int(value.value)
