"""Which packages omlxd needs, and which are installed, from the installed metadata: nothing is imported.

Pure reading; for `doctor`.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?(?P<versions>[^;]*)(?:;(?P<marker>.*))?")
_PLATFORM = re.compile(r"""sys_platform\s*==\s*["'](\w+)["']""")


class Package:
    """One requirement: as it is written, its version here (None: missing), and whether the two agree."""

    __slots__ = ("fits", "installed", "name", "wanted")

    def __init__(self, name: str, versions: str) -> None:
        self.name = name
        self.wanted = name + versions
        self.installed = _installed(name)
        self.fits = self.installed is not None and all(_fits(self.installed, one) for one in versions.split(",") if one)


def required_packages() -> list[Package]:
    """omlxd's own requirements on this platform, without its extras; only omlxd itself where it is not installed."""
    try:
        lines = metadata.requires("omlxd") or []
    except metadata.PackageNotFoundError:
        return [Package("omlxd", "")]
    found = []
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match is not None and _applies(match["marker"] or ""):
            found.append(Package(match["name"], match["versions"].replace(" ", "").strip("()")))
    return found


def _applies(marker: str) -> bool:
    platform = _PLATFORM.search(marker)
    return "extra" not in marker and (platform is None or platform[1] == sys.platform)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(installed: str, specifier: str) -> bool:
    """Compares the numbers of a release, which is all that our own requirements use."""
    match = re.match(r"(==|>=|<)([0-9.]+)$", specifier)
    if match is None:
        return True
    have, want = _release(installed), _release(match[2])
    width = max(len(have), len(want))
    have, want = have + (0,) * (width - len(have)), want + (0,) * (width - len(want))
    return {"==": have == want, ">=": have >= want, "<": have < want}[match[1]]


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()
