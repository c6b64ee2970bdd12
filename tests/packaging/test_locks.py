"""The locks: every dependency, at one exact version, from anywhere."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ["requirements-build.lock", "requirements.lock", "requirements-test.lock"]
PLATFORMS = [
    {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64"},
    {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"},
    {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "aarch64"},
]


def pins(lock: str) -> Iterator[Requirement]:
    for line in (ROOT / lock).read_text().replace("\\\n", " ").splitlines():
        if line and not line.lstrip().startswith("#"):
            yield Requirement(line.split("--hash")[0])


def declared(*extras: str) -> list[Requirement]:
    project = PROJECT["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(text) for group in groups for text in group]


def locked(lock: str, name: str, platform: dict[str, str]) -> Requirement:
    """The pin that holds on `platform`, on the Python that runs this."""
    found = [pin for pin in pins(lock) if canonicalize_name(pin.name) == canonicalize_name(name)]
    (pin,) = [pin for pin in found if pin.marker is None or pin.marker.evaluate(dict(platform))]
    return pin


@pytest.mark.parametrize("platform", PLATFORMS, ids=["macos", "linux", "linux-arm"])
@pytest.mark.parametrize(("lock", "extras"), [("requirements.lock", []), ("requirements-test.lock", ["test"])])
def test_every_dependency_and_theirs_are_locked_at_versions_that_fit(
    lock: str, extras: list[str], platform: dict[str, str]
):
    todo, seen = declared(*extras), set[str]()
    while todo:
        wanted = todo.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({**platform, "extra": ""}):
            continue
        pin = locked(lock, wanted.name, platform)
        (version,) = [spec.version for spec in pin.specifier]
        assert wanted.specifier.contains(version, prereleases=True), f"{wanted} but {pin}"
        if pin.name not in seen:
            seen.add(pin.name)
            todo += needs(pin.name, wanted.extras, platform)
    assert len(seen) > 50


def needs(name: str, extras: set[str], platform: dict[str, str]) -> list[Requirement]:
    """What an installed package asks for. The other platform's halves of mlx are not installed, and ask for nothing."""
    if name in {"mlx-metal", "mlx-cpu"}:
        return []
    found = [Requirement(text) for text in requires(name) or []]
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate({**platform, "extra": extra}) for extra in {"", *extras})
    ]


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_pins_exact_versions_by_hash_and_names_no_place(lock: str):
    text = (ROOT / lock).read_text()
    assert not re.search(r"https?://|file:|--(extra-)?index|--find-links|^-e|^\.|^/", text, flags=re.MULTILINE)
    blocks = re.findall(
        r"^(\S+)==([^\s;]+)[^\\\n]*((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, flags=re.MULTILINE
    )
    assert len(blocks) == len(list(pins(lock))) > 0


def test_the_build_lock_covers_what_the_build_asks_for():
    asked = PROJECT["build-system"]["requires"]
    assert asked == PROJECT["dependency-groups"]["build"]
    assert {Requirement(text).name for text in asked} <= {pin.name for pin in pins("requirements-build.lock")}


def test_running_and_testing_use_the_same_versions():
    tested = {(pin.name, str(pin.specifier), str(pin.marker)) for pin in pins("requirements-test.lock")}
    run = {
        (pin.name, str(pin.specifier), str(pin.marker)) for pin in pins("requirements.lock") if pin.name != "colorama"
    }
    assert run <= tested
