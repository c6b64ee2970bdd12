"""The arrows of DESIGN.md section 1: what each room may import, and what loading one of its modules brings in.

Modules are found by walking the folders, so a new one is held to its room's arrows from its first day.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cache", "engine", "rpc", "daemon", "launchd", "cli")
HEAVY = ("mlx", "mlx_lm", "mlx_vlm", "transformers", "tokenizers", "torch")

# What a room may import of the others: a room, or one module of it.
ARROWS: dict[str, tuple[str, ...]] = {
    "cache": (),
    "engine": ("cache",),
    "rpc": ("engine.api",),
    "daemon": ("cache", "engine", "rpc", "launchd"),
    "launchd": (),
    "cli": ("rpc.client", "rpc.wire", "daemon.settings", "daemon.settings_file", "daemon.paths", "launchd"),
}

# Of what is not ours, rooms with a short list.
OTHERS: dict[str, tuple[str, ...]] = {
    "rpc": ("anyio", "jsonrpcserver", "msgspec"),
    "launchd": (),
    "cli": ("msgspec",),
}

# Modules that must stay light although their room is not: they run before a model is wanted.
LIGHT_MODULES = ("engine.api", "daemon.settings", "daemon.paths", "daemon.main")
LIGHT_ROOMS = ("rpc", "launchd", "cli")

# The hinge, and the modules that its values and errors stand in.
HINGE = ("engine.api", "engine.errors", "engine.generation", "engine.readings")


def modules(room: str) -> Iterator[str]:
    """Dotted names below `omlxd`, packages by their own name."""
    for path in sorted((ROOT / room).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source(module: str) -> Path:
    plain = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return plain if plain.exists() else ROOT.joinpath(*module.split("."), "__init__.py")


def imports(module: str) -> Iterator[str]:
    """Every name that `module` imports, at its top or inside a function; `from a import b` gives both a and a.b."""
    for node in ast.walk(ast.parse(source(module).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def public_names(module: str) -> Iterator[str]:
    """What `module` defines at its top: classes, functions and type aliases."""
    for node in ast.parse(source(module).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def is_within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


ALL = [module for room in ROOMS for module in modules(room)]


@pytest.mark.parametrize("module", ALL)
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    room = module.split(".")[0]
    allowed = (room, *ARROWS[room])
    of_rooms = [name.removeprefix("omlxd.") for name in imports(module) if name.startswith("omlxd.")]
    of_rooms = [name for name in of_rooms if is_within(name, ROOMS)]
    # `from omlxd.rpc import wire` names its package too, which is a docstring and stands for nothing.
    packages = {place.split(".")[0] for place in allowed if "." in place}
    assert [name for name in of_rooms if not is_within(name, allowed) and name not in packages] == []


@pytest.mark.parametrize("module", ALL)
def test_no_room_is_imported_under_a_bare_name(module: str) -> None:
    assert [name for name in imports(module) if is_within(name, ROOMS)] == []


@pytest.mark.parametrize("module", [module for room in OTHERS for module in modules(room)])
def test_a_light_room_imports_few_libraries(module: str) -> None:
    allowed = (*sys.stdlib_module_names, "omlxd", *OTHERS[module.split(".")[0]])
    assert [name for name in imports(module) if not is_within(name, allowed)] == []


@pytest.mark.parametrize("module", HINGE)
def test_the_hinge_imports_the_standard_library_alone(module: str) -> None:
    own = tuple(f"omlxd.{each}" for each in HINGE)
    assert [name for name in imports(module) if not is_within(name, (*sys.stdlib_module_names, *own))] == []


@pytest.mark.parametrize("module", ALL)
def test_what_the_hinge_is_made_of_is_imported_through_it(module: str) -> None:
    behind = tuple(f"omlxd.{each}" for each in HINGE[1:])
    assert module in HINGE or [name for name in imports(module) if is_within(name, behind)] == []


def test_the_hinge_gives_all_that_it_is_made_of() -> None:
    given = {name for name in imports("engine.api") if is_within(name, tuple(f"omlxd.{each}" for each in HINGE[1:]))}
    made = {f"omlxd.{module}.{name}" for module in HINGE[1:] for name in public_names(module)}
    assert made <= given


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_opens_with_its_docstring_and_nothing_more(room: str) -> None:
    body = ast.parse((ROOT / room / "__init__.py").read_text()).body
    assert [type(node) for node in body] == [ast.Expr]


def loaded_by(*names: str) -> set[str]:
    """What a fresh interpreter has in sys.modules after importing `names`."""
    command = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", command, *names], check=True, capture_output=True, text=True, cwd=ROOT.parent
    )
    return set(done.stdout.split())


def heavy(loaded: set[str]) -> set[str]:
    return {name for name in loaded if is_within(name, HEAVY)}


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_a_light_room_loads_no_model_library(room: str) -> None:
    names = [f"omlxd.{module}" for module in modules(room) if not module.endswith("__main__")]
    assert heavy(loaded_by(*names)) == set()


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_a_light_module_loads_no_model_library(module: str) -> None:
    if not source(module).exists():
        pytest.skip(f"{module} is not written yet")
    assert heavy(loaded_by(f"omlxd.{module}")) == set()


def test_the_command_line_loads_no_event_loop() -> None:
    names = [f"omlxd.{module}" for module in modules("cli") if not module.endswith("__main__")]
    assert {"asyncio", "anyio", "jsonrpcserver"} & loaded_by(*names) == set()


def test_the_hinge_and_the_agent_load_nothing_but_themselves() -> None:
    names = [f"omlxd.{module}" for module in modules("launchd")]
    ours = {name for name in loaded_by("omlxd.engine.api", *names) if name.startswith("omlxd.")}
    assert ours == {"omlxd.engine", *(f"omlxd.{module}" for module in HINGE), *names}
