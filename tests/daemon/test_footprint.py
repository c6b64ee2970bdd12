"""Readings of memory: macOS's by its own call through ctypes, Linux's from its files."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from omlxd.daemon.cgroup import tightest
from omlxd.daemon.footprint import platform_probe
from omlxd.daemon.footprint_darwin import VM_COUNT, DarwinProbe, RusageInfo, VmStatistics
from omlxd.daemon.footprint_linux import LinuxProbe

GB = 10**9


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("NO C COMPILER: macOS's readings are not tested; install gcc")
    built = tmp_path_factory.mktemp("libsystem") / "libfake.so"
    source = Path(__file__).parent / "fake_libsystem_memory.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
    return str(built)


@pytest.mark.parametrize(
    ("field", "offset"),
    [
        ("wired_size", 56),
        ("resident_size", 64),
        ("phys_footprint", 72),
        ("lifetime_max_phys_footprint", 240),
        ("interval_max_phys_footprint", 280),
    ],
)
def test_the_usage_structure_has_its_fields_where_the_system_puts_them(field: str, offset: int) -> None:
    assert getattr(RusageInfo, field).offset == offset
    assert ctypes.sizeof(RusageInfo) == 296


@pytest.mark.parametrize(
    ("field", "offset"),
    [
        ("free_count", 0),
        ("inactive_count", 8),
        ("wire_count", 12),
        ("purgeable_count", 88),
        ("speculative_count", 92),
        ("compressor_page_count", 128),
        ("external_page_count", 136),
        ("internal_page_count", 140),
        ("total_uncompressed_pages_in_compressor", 144),
    ],
)
def test_the_page_counts_stand_where_the_system_puts_them(field: str, offset: int) -> None:
    assert getattr(VmStatistics, field).offset == offset
    assert VM_COUNT == 38


def test_macos_readings_come_through_the_real_calls(library: str) -> None:
    probe = DarwinProbe(library)
    assert (probe.footprint(), probe.total()) == (5_000_000_001, 128 * 2**30)
    assert probe.available() == (1000 + 200 + 30) * 16384
    assert probe.pressure() == "warn"
    assert probe.gpu_limit() == 96 * 2**30


def test_a_machine_without_such_a_gpu_has_no_limit_for_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NO_GPU", "1")
    assert DarwinProbe(library).gpu_limit() is None


def test_an_older_system_gives_the_footprint_all_the_same(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = DarwinProbe(library)
    monkeypatch.setenv("FAKE_ONLY_V0", "1")
    assert probe.footprint() == 5_000_000_001


def test_a_reading_that_is_refused_says_so(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = DarwinProbe(library)
    monkeypatch.setenv("FAKE_EPERM", "1")
    with pytest.raises(PermissionError, match="proc_pid_rusage"):
        probe.footprint()


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A picture of a Linux machine's root."""
    write(tmp_path, "proc/self/status", "Name:\tomlxd\nVmHWM:\t 9000 kB\nRssAnon:\t 5000 kB\nRssFile:\t 777 kB\n")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_linux_counts_anonymous_shared_and_swapped_pages_and_no_files(machine: Path) -> None:
    write(machine, "proc/self/status", "RssAnon:\t5000 kB\nRssFile:\t777 kB\nRssShmem:\t20 kB\nVmSwap:\t3 kB\n")
    assert LinuxProbe(machine).footprint() == 5023 * 1024


@pytest.mark.parametrize(
    ("some", "full", "pressure"), [(0.0, 0.0, "normal"), (10.5, 0.0, "warn"), (10.5, 5.5, "critical")]
)
def test_linux_pressure_is_the_time_lost_to_it(machine: Path, some: float, full: float, pressure: str) -> None:
    tail = "avg60=0.00 avg300=0.00 total=0"
    write(machine, "proc/pressure/memory", f"some avg10={some} {tail}\nfull avg10={full} {tail}\n")
    assert LinuxProbe(machine).pressure() == pressure


def test_a_kernel_without_pressure_files_is_under_none(machine: Path) -> None:
    assert LinuxProbe(machine).pressure() == "normal"


def test_no_group_is_no_limit(machine: Path) -> None:
    assert tightest(machine) is None


def test_a_version_2_group_limits_with_all_above_it(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/app/inner\n")
    write(machine, "sys/fs/cgroup/app/memory.max", "1000\n")
    write(machine, "sys/fs/cgroup/app/memory.current", "700\n")
    write(machine, "sys/fs/cgroup/app/memory.stat", "anon 500\ninactive_file 50\n")
    write(machine, "sys/fs/cgroup/app/inner/memory.max", "max\n")
    write(machine, "sys/fs/cgroup/app/inner/memory.current", "700\n")
    found = tightest(machine)
    assert found is not None
    assert (found.limit, found.available) == (1000, 350)
    assert LinuxProbe(machine).total() == 1000
    assert LinuxProbe(machine).available() == 350


def test_a_version_1_group_limits_too(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "4:memory:/jobs/1\n0::/\n")
    write(machine, "sys/fs/cgroup/memory/jobs/1/memory.limit_in_bytes", "2000\n")
    write(machine, "sys/fs/cgroup/memory/jobs/1/memory.usage_in_bytes", "500\n")
    write(machine, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(machine, "sys/fs/cgroup/memory/memory.usage_in_bytes", "500\n")
    assert LinuxProbe(machine).available() == 1500


@pytest.mark.skipif(sys.platform != "linux", reason="reads this machine's own files")
def test_the_footprint_of_this_process_follows_its_arrays() -> None:
    probe = platform_probe()
    before = probe.footprint()
    array = mx.ones((64, 2**20), dtype=mx.uint8)
    mx.eval(array)
    grown = probe.footprint() - before
    assert 60 * 2**20 <= grown <= 80 * 2**20
    assert 0 < probe.available() <= probe.total()
