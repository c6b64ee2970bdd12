"""The wheel and the source distribution: whole, and at home in any directory."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ["cache", "cli", "daemon", "engine", "launchd", "rpc"]


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two files, built from a copy of the clone: the sdist from the copy, the wheel from the sdist."""
    copy, dist = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ["src", *ROOMS]:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), cwd=copy)
    return dist


@pytest.fixture(scope="module")
def site(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed where nothing of the clone is."""
    site, (wheel,) = tmp_path_factory.mktemp("site"), dist.glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel), cwd=site)
    return site


def modules(names: list[str]) -> set[str]:
    return {name for name in names if name.endswith((".py", ".toml", "py.typed"))}


def test_the_wheel_holds_every_module_of_every_room_and_no_test(dist: Path):
    (wheel,) = dist.glob("*.whl")
    expected = {f"omlxd/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    expected |= {"omlxd/__init__.py", "omlxd/py.typed", "omlxd/daemon/default_config.toml"}
    assert modules(zipfile.ZipFile(wheel).namelist()) == expected


def test_the_sdist_holds_real_files_where_the_clone_has_links(dist: Path):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        assert not [member.name for member in archive if member.issym()]
    assert any(name.endswith("/src/omlxd/daemon/main.py") for name in names)
    assert any(name.endswith("/LICENSE") for name in names)


def test_the_installed_commands_work_from_another_directory(site: Path, tmp_path: Path):
    env = {"PYTHONPATH": str(site)}
    where = run(sys.executable, "-c", "import omlxd; print(omlxd.__file__)", cwd=tmp_path, **env)
    assert where.strip() == str(site / "omlxd" / "__init__.py")
    assert run(sys.executable, str(site / "bin" / "omlxd"), "--version", cwd=tmp_path, **env) == "omlxd 0.1.0\n"
    assert run(sys.executable, str(site / "bin" / "omlxctl"), "--version", cwd=tmp_path, **env) == "omlxctl 0.1.0\n"


def test_the_installed_package_brings_its_default_settings(site: Path, tmp_path: Path):
    code = "from omlxd.daemon.settings import default_file; print(default_file(), end='')"
    shown = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    assert shown == (ROOT / "daemon" / "default_config.toml").read_text()
