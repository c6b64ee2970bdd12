"""The daemon's settings: every key with its type, range and default, read once from the file and the environment.

Owns the tables of the settings; `daemon.settings_file` edits the file, `daemon/default_config.toml` documents it.
Values only, safe on any thread: called by the daemon at its start and by `omlxctl config`. The environment is handed in
by the two modules that start a process; no other module reads it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, cast

from omlxd.daemon.setting_types import (
    GB,
    KB,
    MB,
    Choice,
    Directories,
    Directory,
    Duration,
    Flag,
    Kind,
    Size,
    Text,
    Value,
    Whole,
)

Source = Literal["default", "file", "env"]
Table = TypeVar("Table")
_PREFIX = "OMLXD_"
_NOT_KEYS = {"OMLXD_HOME", "OMLXD_SOCKET"}  # these say where the settings are
_BILLION = 1_000_000_000


class ConfigError(Exception):
    """The settings cannot be used. The message names the place, the key and what to do; no `key` means a whole file."""

    def __init__(self, message: str, *, key: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.key = key
        self.value = value


def _key(kind: Kind, default: Value) -> Any:
    return field(default=default, metadata={"kind": kind})


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """Lifecycle: how long a shutdown waits for live requests, and after how long an idle daemon ends (0: never)."""

    grace_s: float = _key(Duration(0), 10.0)
    idle_exit_s: float = _key(Duration(0), 0.0)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The log file: its level, form, whether prompts may appear in it, and how much of it is kept."""

    level: str = _key(Choice(("debug", "info", "warning", "error")), "info")
    json: bool = _key(Flag(), False)
    content: bool = _key(Flag(), False)
    max_bytes: int = _key(Size(low=4 * KB), 20 * MB)
    keep: int = _key(Whole(1, 1000), 5)  # with 0 the library would never rotate


@dataclass(frozen=True, slots=True)
class RpcSettings:
    """What one connection may ask for: bytes of a frame, requests at once."""

    max_frame_bytes: int = _key(Size(low=KB), 64 * MB)
    max_in_flight: int = _key(Whole(1, 65536), 256)


@dataclass(frozen=True, slots=True)
class ModelsSettings:
    """Where models are looked for, which one is meant when none is named, and how long an idle one stays."""

    dirs: tuple[str, ...] = _key(Directories(), ())
    default: str | None = _key(Text(), None)
    autoload: bool = _key(Flag(), True)
    ttl_s: float = _key(Duration(0), 0.0)
    allow_remote_code: bool = _key(Flag(), False)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Bounds of one model's engine: rows, waiting requests, and a prefill turn in tokens and milliseconds."""

    max_batch: int = _key(Whole(1, 4096), 32)
    max_queue: int = _key(Whole(1, 1_000_000), 256)
    prefill_chunk: int = _key(Whole(16, 1_048_576), 2048)
    max_decode_stall_ms: float = _key(Duration(1), 80.0)
    max_chunk_ms: float = _key(Duration(1), 250.0)


@dataclass(frozen=True, slots=True)
class HotCacheSettings:
    """The tier in memory. `max_bytes` None is "auto": a share of the memory limit."""

    max_bytes: int | None = _key(Size(word="auto"), None)


@dataclass(frozen=True, slots=True)
class SsdCacheSettings:
    """The tier on disk. `dir` None is the home's own cache directory."""

    enabled: bool = _key(Flag(), True)
    dir: str | None = _key(Directory(), None)
    max_bytes: int = _key(Size(), 50 * GB)
    min_free_bytes: int = _key(Size(), 10 * GB)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The prefix cache: whether there is one, and its block in tokens."""

    enabled: bool = _key(Flag(), True)
    block_size: int = _key(Whole(16, 8192), 256)
    hot: HotCacheSettings = field(default_factory=HotCacheSettings)
    ssd: SsdCacheSettings = field(default_factory=SsdCacheSettings)


@dataclass(frozen=True, slots=True)
class SessionsSettings:
    """How many saved sessions there may be, and how large together."""

    max_count: int = _key(Whole(0, _BILLION), 1000)
    max_bytes: int = _key(Size(), 20 * GB)


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """How much memory the daemon may take. A limit given in bytes takes the place of the tier's."""

    tier: str = _key(Choice(("safe", "balanced", "aggressive")), "balanced")
    limit_bytes: int | None = _key(Size(low=64 * MB), None)
    wired_limit_bytes: int | None = _key(Size(), None)


@dataclass(frozen=True, slots=True)
class ImagesSettings:
    """Where images may come from besides the message itself, how large they may be, and what is kept of them."""

    allow_paths: tuple[str, ...] = _key(Directories(), ())
    allow_urls: bool = _key(Flag(), False)
    max_pixels: int = _key(Whole(1, 178_000_000), 40_000_000)  # Pillow opens no WebP of more
    features_max_bytes: int = _key(Size(), 256 * MB)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set, frozen. `Settings()` is the defaults."""

    daemon: DaemonSettings = field(default_factory=DaemonSettings)
    log: LogSettings = field(default_factory=LogSettings)
    rpc: RpcSettings = field(default_factory=RpcSettings)
    models: ModelsSettings = field(default_factory=ModelsSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    sessions: SessionsSettings = field(default_factory=SessionsSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    images: ImagesSettings = field(default_factory=ImagesSettings)


@dataclass(frozen=True, slots=True)
class Reading:
    """One key as it stands: its value, and whether that is the default, the file's or the environment's."""

    key: str
    value: Value
    source: Source


@dataclass(frozen=True, slots=True)
class _Spec:
    kind: Kind
    default: Value


def _walk(table: Any, prefix: str = "") -> Iterator[tuple[str, _Spec]]:
    for entry in fields(table):
        if "kind" in entry.metadata:
            yield prefix + entry.name, _Spec(entry.metadata["kind"], cast(Value, entry.default))
        else:
            yield from _walk(entry.default_factory, f"{prefix}{entry.name}.")


_SPECS: Mapping[str, _Spec] = dict(_walk(Settings))
_TABLES = {key[: key.rindex(".")] for key in _SPECS}


def load(path: str, env: Mapping[str, str]) -> Settings:
    """The settings of the file at `path` (missing: defaults) under the environment's. Raises ConfigError."""
    values = {reading.key: reading.value for reading in readings(path, env)}
    return _build(Settings, values)


def readings(path: str, env: Mapping[str, str]) -> Sequence[Reading]:
    """Every key in the order of the tables, with its value's source. Raises ConfigError."""
    in_file = _from_file(path)
    in_env = _from_env(env)
    found = [(key, in_file.get(key), in_env.get(key)) for key in _SPECS]
    return [env_one or file_one or Reading(key, _SPECS[key].default, "default") for key, file_one, env_one in found]


def values(read: Settings) -> Mapping[str, Value]:
    """Every key with its value in `read`, in the order of the tables."""
    return dict(_values(read))


def _values(table: Any, prefix: str = "") -> Iterator[tuple[str, Value]]:
    for entry in fields(table):
        value = getattr(table, entry.name)
        if "kind" in entry.metadata:
            yield prefix + entry.name, value
        else:
            yield from _values(value, f"{prefix}{entry.name}.")


def check(key: str, text: str, *, where: str) -> object:
    """What the file would hold for `key` set to `text`, e.g. on a command line. Raises ConfigError naming `where`."""
    spec = _spec(key, text, where=where)
    raw = spec.kind.read(text)
    _parse(key, raw, spec, where=where)
    return raw


def _from_file(path: str) -> dict[str, Reading]:
    raw = dict(_leaves(_toml(path), where=path))
    return {key: Reading(key, _parse(key, value, _SPECS[key], where=path), "file") for key, value in raw.items()}


def _toml(path: str) -> dict[str, object]:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); mend it or delete it") from error
    if not data:
        raise ConfigError(f"{path}: is empty, as a crash may leave a file; restore it, or delete it for the defaults")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid TOML ({error}); mend it, or delete it for the defaults") from error


def _leaves(table: Mapping[str, object], *, where: str, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Each known key of a nested table with its raw value; raises ConfigError at the first unknown one."""
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and key not in _SPECS and (value or key in _TABLES):
            yield from _leaves(value, where=where, prefix=key + ".")
        elif key in _TABLES:
            raise ConfigError(f"{where}: {key} is a table, not {value!r}; write [{key}]", key=key, value=value)
        else:
            _spec(key, value, where=where)
            yield key, value


def _from_env(env: Mapping[str, str]) -> dict[str, Reading]:
    found = {}
    for name, text in env.items():
        if not name.startswith(_PREFIX) or name in _NOT_KEYS or not text:
            continue
        key = name.removeprefix(_PREFIX).lower().replace("__", ".")
        spec = _spec(key, text, where=f"environment variable {name}")
        found[key] = Reading(key, _parse(key, spec.kind.read(text), spec, where=f"environment variable {name}"), "env")
    return found


def _spec(key: str, value: object, *, where: str) -> _Spec:
    try:
        return _SPECS[key]
    except KeyError:
        raise ConfigError(f"{where}: unknown key {key} (= {value!r}){_nearest(key)}", key=key, value=value) from None


def _nearest(key: str) -> str:
    import difflib  # only on the way to an error

    near = difflib.get_close_matches(key, _SPECS, n=1, cutoff=0.0)
    return f"; the nearest known key is {near[0]}"


def _parse(key: str, raw: object, spec: _Spec, *, where: str) -> Value:
    try:
        return spec.kind.parse(raw)
    except ValueError as error:
        raise ConfigError(f"{where}: {key} {error}, not {raw!r}", key=key, value=raw) from None


def _build(table: type[Table], values: Mapping[str, Value], prefix: str = "") -> Table:
    arguments: dict[str, object] = {}
    for entry in fields(cast(Any, table)):
        if "kind" in entry.metadata:
            arguments[entry.name] = values[prefix + entry.name]
        else:
            nested = cast("type[Any]", entry.default_factory)
            arguments[entry.name] = _build(nested, values, f"{prefix}{entry.name}.")
    return table(**arguments)


def default_file() -> str:
    """The commented file that documents every key: what a new home gets as its config.toml."""
    with open(os.path.join(os.path.dirname(__file__), "default_config.toml"), encoding="utf-8") as file:
        return file.read()
