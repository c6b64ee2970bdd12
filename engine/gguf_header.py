"""The header of a GGUF file: its metadata and where its tensors lie, read with every count and offset checked.

MLX reads the tensors in C++ and trusts the file; a damaged one would take the process down. So this comes first, in
plain Python: what passes here has every tensor inside the file. Used by the converter's process; no thread, no state.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")
Value = bool | int | float | str | list["Value"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_MAX_NESTING = 2


@dataclass(frozen=True, slots=True)
class TensorType:
    """How a GGUF tensor type stores `block` values in `block_bytes`; `bits` is its width as an MLX quantisation."""

    name: str
    block: int
    block_bytes: int
    bits: int | None = None


# What MLX keeps as it is. It would widen some others to fp16, which is not what their owner chose them for.
TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18, bits=4),
    3: TensorType("Q4_1", 32, 20, bits=4),
    8: TensorType("Q8_0", 32, 34, bits=8),
}
# Names of the types that are common elsewhere, for the message that refuses them.
_OTHER_TYPES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


class BadGguf(Exception):
    """The file is no whole GGUF file; the message says in one line what is wrong."""


class UnknownTensorType(Exception):
    """The file is whole as far as can be told, but holds tensors of a type that is not imported."""

    def __init__(self, name: str, tensor: str) -> None:
        super().__init__(f"{tensor} is {name}")
        self.name, self.tensor = name, tensor


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor. `shape` is in row-major order, as MLX and numpy have it (the file has it the other way round)."""

    name: str
    shape: tuple[int, ...]
    type: TensorType


@dataclass(frozen=True, slots=True)
class Header:
    """All that a GGUF file says before its tensors' bytes."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]


def read_header(path: Path) -> Header:
    """Raises BadGguf, UnknownTensorType or OSError."""
    with path.open("rb") as file:
        return _read(_Reader(file, path.stat().st_size))


class _Reader:
    """Reads the file's primitives; nothing is allocated for a length that the file does not have."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size

    @property
    def position(self) -> int:
        return self._file.tell()

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.size - self.position:
            raise BadGguf(f"it is cut: {num_bytes} bytes were expected at {self.position} of {self.size}")
        return self._file.read(num_bytes)

    def number(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return int(value)

    def count(self, what: str, smallest_bytes: int) -> int:
        """A count of things that each take at least so many bytes of what is left of the file."""
        count = self.number("Q")
        if count * smallest_bytes > self.size - self.position:
            raise BadGguf(f"it claims {count} {what}, more than {self.size} bytes can hold")
        return count

    def string(self) -> str:
        # Some writers cut a token in the middle of a character; the bytes matter little where that happens.
        return self.take(self.count("characters", 1)).decode("utf-8", "replace")

    def value(self, kind: int, nesting: int = 0) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and nesting < _MAX_NESTING:
            return self._array(nesting)
        if kind in _SCALARS:
            return self._scalars(_SCALARS[kind], 1)[0]
        raise BadGguf(f"metadata has a value of unknown kind {kind}")

    def _array(self, nesting: int) -> Value:
        kind = self.number("I")
        code = _SCALARS.get(kind)
        count = self.count("array elements", struct.calcsize("<" + code) if code else 8)
        if code:
            return self._scalars(code, count)
        return [self.value(kind, nesting + 1) for _ in range(count)]

    def _scalars(self, code: str, count: int) -> list[Value]:
        form = f"<{count}{code}"
        return list(struct.unpack(form, self.take(struct.calcsize(form))))


def _read(reader: _Reader) -> Header:
    if reader.take(4) != _MAGIC:
        raise BadGguf("it does not start with GGUF")
    version = reader.number("I")
    if version not in _VERSIONS:
        raise BadGguf(f"it is of version {version}; versions 2 and 3 are read, little-endian")
    num_tensors = reader.count("tensors", 24)
    num_values = reader.count("metadata values", 13)
    metadata = _distinct(num_values, lambda: (reader.string(), reader.value(reader.number("I"))))
    entries = _distinct(num_tensors, lambda: _tensor_entry(reader))
    data_bytes = reader.size - _aligned(reader.position, metadata)
    return Header(metadata, {name: _placed(name, entry, data_bytes) for name, entry in entries.items()})


def _distinct(count: int, read: Callable[[], tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for _ in range(count):
        name, value = read()
        if name in found:
            raise BadGguf(f"it has {name!r} twice")
        found[name] = value
    return found


def _tensor_entry(reader: _Reader) -> tuple[str, tuple[tuple[int, ...], int, int]]:
    name = reader.string()
    dimensions = reader.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise BadGguf(f"{name} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are possible")
    shape = tuple(reader.number("Q") for _ in range(dimensions))
    return name, (shape[::-1], reader.number("I"), reader.number("Q"))


def _aligned(position: int, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise BadGguf(f"general.alignment is {alignment!r}, not a power of two from 8 to 2**20")
    return -(-position // alignment) * alignment


def _placed(name: str, entry: tuple[tuple[int, ...], int, int], data_bytes: int) -> Tensor:
    shape, code, offset = entry
    if min(shape) < 1 or math.prod(shape) >= 2**62:
        raise BadGguf(f"{name} has the impossible shape {shape}")
    if code not in TYPES:
        raise UnknownTensorType(_OTHER_TYPES.get(code, f"type {code}"), name)
    kind = TYPES[code]
    if shape[-1] % kind.block:
        raise BadGguf(f"{name} has rows of {shape[-1]} values; {kind.name} stores {kind.block} at a time")
    end = offset + math.prod(shape) // kind.block * kind.block_bytes
    if end > data_bytes:
        raise BadGguf(f"it is cut: {name} ends at byte {end} of {max(0, data_bytes)} bytes of tensors")
    return Tensor(name, shape, kind)
