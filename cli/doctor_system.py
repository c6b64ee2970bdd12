"""The checks of `omlxctl doctor` on the system: packages, and how much memory the GPU may wire. Main thread only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

from omlxd.cli.context import Context
from omlxd.cli.errors import CliError
from omlxd.cli.finding import Finding
from omlxd.cli.packages import required_packages
from omlxd.cli.tables import size

_MB = 1024**2
_MOST_OF_RAM = 0.9  # over that, wired memory leaves macOS too little to live on


def check_packages() -> Iterator[Finding]:
    packages = required_packages()
    wrong = [package for package in packages if not package.fits]
    for package in wrong:
        message = f"{package.name} {package.installed or 'is missing'}, needed: {package.wanted}"
        yield Finding("fail", "packages", message, f"pip install '{package.wanted}' in this environment")
    if not wrong:
        yield Finding("ok", "packages", ", ".join(f"{package.name} {package.installed}" for package in packages))


def check_wired_limit(context: Context) -> Iterator[Finding]:
    """macOS's bound on memory that the GPU may hold, against the machine's and the setting. Nothing elsewhere."""
    limit_mb, ram_bytes = (_sysctl(context, name) for name in ("iogpu.wired_limit_mb", "hw.memsize"))
    if limit_mb is None or ram_bytes is None:
        return
    limit_bytes = limit_mb * _MB
    try:
        wanted_bytes = context.settings().memory.wired_limit_bytes or 0
    except CliError:
        wanted_bytes = 0  # the settings have a finding of their own
    if limit_bytes > ram_bytes * _MOST_OF_RAM:
        message = f"iogpu.wired_limit_mb is {limit_mb}, and the Mac has {size(ram_bytes)}: macOS may freeze or panic"
        yield Finding("warn", "wired", message, "`sudo sysctl iogpu.wired_limit_mb=0` is macOS's own limit")
    elif limit_bytes and wanted_bytes > limit_bytes:
        message = f"memory.wired_limit_bytes is {size(wanted_bytes)}, and macOS lets the GPU have {size(limit_bytes)}"
        advice = f"lower the setting, or `sudo sysctl iogpu.wired_limit_mb={-(-wanted_bytes // _MB)}`"
        yield Finding("warn", "wired", message, advice)
    else:
        yield Finding("ok", "wired", f"the GPU may have {size(limit_bytes)}" if limit_mb else "macOS's own limit")


def _sysctl(context: Context, name: str) -> int | None:
    """The kernel's number of that name; None where it has none."""
    program = shutil.which("sysctl", path=f"{context.env.get('PATH', os.defpath)}:/usr/sbin")
    if program is None:
        return None
    command = [program, "-n", name]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdecimal() else None
