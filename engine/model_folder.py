"""One model folder examined: what kind it is, how large, and what keeps it from being loaded.

Reads the small JSON files and the weights' headers, imports neither mlx nor transformers, runs nothing of the folder.
Called by the catalog on its worker thread; holds no state.

A folder's own Python is run only with consent (`models.allow_remote_code`), so what would need it is found here:
`model_file` in config.json, which mlx-lm would import, and an `auto_map` entry for the tokenizer in
tokenizer_config.json or config.json, which transformers would. An `auto_map` for the model's classes alone is no
obstacle: mlx-lm never looks at it and many good folders still carry one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omlxd.engine import architectures
from omlxd.engine.weights import UNREADABLE, BadWeights, is_lfs_pointer, tensor_types

Kind = Literal["text", "vision"]

WEIGHTS = "model*.safetensors"
_INDEX = "model.safetensors.index.json"
_MARKS = ("config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS)
# Any one of these sets is enough for transformers to build a tokenizer.
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("tiktoken.model",), ("vocab.json", "merges.txt"))
_COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_DOWNLOAD_AGAIN = "download or copy the model again"


@dataclass(frozen=True, slots=True)
class Defect:
    """Why a folder cannot be loaded, in one line, and what to do. `what` names a thing that is not supported."""

    reason: str
    hint: str = _DOWNLOAD_AGAIN
    what: str | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """What a folder turned out to be. `size_bytes` counts weight files only; `remote_code`: it brings its own."""

    kind: Kind
    size_bytes: int
    remote_code: bool
    defect: Defect | None


class _Broken(Exception):
    def __init__(self, defect: Defect) -> None:
        super().__init__(defect.reason)
        self.defect = defect


def is_model_folder(path: Path) -> bool:
    """Whether the folder means to be a model, whole or broken. Raises OSError if it cannot be listed."""
    return path.is_dir() and any(_present(path, mark) for mark in _MARKS)


def examine(path: Path, *, allow_remote_code: bool) -> Findings:
    """Judges a folder; never raises for what is in it."""
    try:
        size_bytes = sum(file.stat().st_size for file in path.glob(WEIGHTS))
    except OSError as error:
        return Findings("text", 0, False, Defect(f"cannot be read: {error.strerror}", "check its permissions"))
    kind: Kind = "text"
    remote_code = False
    try:
        config = _json_object(path / "config.json")
        kind = _kind(config)
        remote_code = _brings_code(path, config)
        _check_consent(remote_code, allowed=allow_remote_code)
        _check_config(config, has_own_class="model_file" in config)
        _check_tokenizer(path)
        _check_weights(path, kind)
    except _Broken as broken:
        return Findings(kind, size_bytes, remote_code, broken.defect)
    except OSError as error:
        return Findings(kind, size_bytes, remote_code, Defect(f"cannot be read: {error}", "check its permissions"))
    return Findings(kind, size_bytes, remote_code, None)


def _present(path: Path, pattern: str) -> bool:
    return next(path.glob(pattern), None) is not None


def _json_object(file: Path) -> Mapping[str, object]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise _Broken(Defect(f"{file.name} is missing")) from None
    except (ValueError, RecursionError):
        pointer = is_lfs_pointer(file)
        raise _Broken(Defect(f"{file.name} is {'a git-lfs pointer' if pointer else 'not valid JSON'}")) from None
    if not isinstance(value, dict):
        raise _Broken(Defect(f"{file.name} is not a JSON object"))
    return value


def _kind(config: Mapping[str, object]) -> Kind:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not architectures.is_vision(model_type):
        return "text"
    return "vision" if "vision_config" in config or not architectures.is_text(model_type) else "text"


def _brings_code(path: Path, config: Mapping[str, object]) -> bool:
    configs = [config]
    if (path / "tokenizer_config.json").exists():
        configs.append(_json_object(path / "tokenizer_config.json"))
    return "model_file" in config or any(_maps_tokenizer(each.get("auto_map")) for each in configs)


def _maps_tokenizer(auto_map: object) -> bool:
    # A list is the older form, in which the tokenizer's classes stand alone.
    return isinstance(auto_map, list) or "AutoTokenizer" in _mapping(auto_map)


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _check_consent(remote_code: bool, *, allowed: bool) -> None:
    if remote_code and not allowed:
        reason = "it runs Python code from the model's folder; set models.allow_remote_code = true if you trust it"
        raise _Broken(Defect(reason, what="remote code"))


def _check_config(config: Mapping[str, object], *, has_own_class: bool) -> None:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise _Broken(Defect("config.json names no model_type", "use a model in MLX or Hugging Face format"))
    if not (has_own_class or architectures.is_text(model_type) or architectures.is_vision(model_type)):
        reason = "neither mlx-lm nor mlx-vlm has it; a newer omlxd may"
        raise _Broken(Defect(reason, what=f"model type {model_type!r}"))
    for part in (config, _mapping(config.get("text_config"))):
        for key in _COUNTS:
            _check_count(key, part.get(key))


def _check_count(key: str, value: object) -> None:
    # Some architectures give one number per layer. Zero or less, or a number written as text, is damage.
    for number in value if isinstance(value, list) else [value]:
        if number is not None and (type(number) is not int or number < 0):
            raise _Broken(Defect(f"config.json: {key} is {number!r}, not a count"))


def _check_tokenizer(path: Path) -> None:
    if not any(all((path / name).exists() for name in names) for names in _TOKENIZERS) and not _present(
        path, "*.tiktoken"
    ):
        raise _Broken(Defect("the tokenizer is missing: no tokenizer.json or tokenizer.model"))
    for name in {name for names in _TOKENIZERS for name in names}:
        file = path / name
        if file.exists() and (file.stat().st_size == 0 or is_lfs_pointer(file)):
            raise _Broken(Defect(f"{name} is empty or a git-lfs pointer"))
    if (path / "tokenizer.json").exists() and not _looks_whole(path / "tokenizer.json"):
        raise _Broken(Defect("tokenizer.json is cut or not a JSON object"))


def _looks_whole(file: Path) -> bool:
    # Many megabytes: parsing them all for a list would take seconds. A cut file lacks its last brace.
    with file.open("rb") as stream:
        head = stream.read(64)
        stream.seek(max(0, file.stat().st_size - 64))
        return head.lstrip().startswith(b"{") and stream.read().rstrip().endswith(b"}")


def _check_weights(path: Path, kind: Kind) -> None:
    files = _weight_files(path, kind)
    if not files:
        reason, hint = f"there are no weights: no {WEIGHTS}", "convert the model with mlx_lm.convert, or pull it again"
        raise _Broken(Defect(reason, hint))
    try:
        tensors = {file: tensor_types(file) for file in files}
    except BadWeights as error:
        raise _Broken(Defect(str(error))) from None
    for file, types in tensors.items():
        _check_types(file, types)
    if (path / _INDEX).exists():
        _check_index(path, frozenset[str]().union(*tensors.values()))


def _weight_files(path: Path, kind: Kind) -> list[Path]:
    """What will be loaded: where there is no index, mlx-vlm takes files of other names besides."""
    files = set(path.glob(WEIGHTS))
    if files and kind == "vision" and not (path / _INDEX).exists():
        files |= {file for file in path.glob("[!.]*.safetensors") if not file.name.endswith("consolidated.safetensors")}
    return sorted(files)


def _check_types(file: Path, types: Mapping[str, str]) -> None:
    for tensor, dtype in types.items():
        if dtype in UNREADABLE:
            reason = f"{file.name} has it in {tensor!r} and mlx cannot read it; use a version of the model made for MLX"
            raise _Broken(Defect(reason, what=f"data type {dtype}"))


def _check_index(path: Path, stored: frozenset[str]) -> None:
    """An index may be older than the files; only a tensor that no file holds is a fault."""
    shards = _mapping(_json_object(path / _INDEX).get("weight_map"))
    if missing := sorted(name for name in shards if name not in stored):
        shard = shards[missing[0]]
        raise _Broken(Defect(f"{len(missing)} tensors are missing, the first would be in {shard}"))
