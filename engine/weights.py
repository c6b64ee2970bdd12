"""Safetensors files judged by their header: is the file whole, and which tensors does it hold?

Reads the header and the file's length, never a weight, so a folder of any size is judged in milliseconds. Called by the
catalog on its worker thread; holds no state. Format: https://github.com/huggingface/safetensors (8 bytes of
little-endian header length, a JSON object, then the tensors' bytes without gaps).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

_LENGTH_BYTES = 8
# The reference reader refuses longer headers too; a file that claims more is damaged.
_MAX_HEADER_BYTES = 100_000_000
_LFS_MARK = b"version https://git-lfs"
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
# What mlx does not read. mlx-vlm would write other types into the files' headers for a moment, and a model's files are
# its owner's: whoever loads asks here first.
UNREADABLE = frozenset({"F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F64"})


class BadWeights(Exception):
    """A weight file that cannot be used; the message is one line that names the file and what is wrong with it."""


def is_lfs_pointer(path: Path) -> bool:
    """Whether the file is git-lfs's text stub instead of the content it stands for."""
    with path.open("rb") as file:
        return file.read(len(_LFS_MARK)) == _LFS_MARK


def tensor_types(path: Path) -> dict[str, str]:
    """The tensors of a safetensors file that is whole, with their data types.

    Raises BadWeights, or OSError if it cannot be read.
    """
    size = path.stat().st_size
    header, data_bytes = _header(path, size)
    header.pop("__metadata__", None)
    tensors = {name: _checked(path, name, entry) for name, entry in header.items()}
    end = max((end for _, end in tensors.values()), default=0)
    if end > data_bytes:
        missing = end - data_bytes
        raise BadWeights(f"{path.name} is cut: {missing} of {size + missing} bytes are missing")
    return {name: dtype for name, (dtype, _) in tensors.items()}


def _header(path: Path, size: int) -> tuple[dict[str, object], int]:
    """The parsed header and how many bytes of tensors follow it."""
    if size == 0:
        raise BadWeights(f"{path.name} is empty")
    if is_lfs_pointer(path):
        raise BadWeights(f"{path.name} is a git-lfs pointer, not the weights")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > _MAX_HEADER_BYTES:
            raise BadWeights(f"{path.name} is not a safetensors file: it starts with no plausible header length")
        if length > size - _LENGTH_BYTES:
            raise BadWeights(f"{path.name} is cut: its header of {length} bytes does not fit in {size} bytes")
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadWeights(f"{path.name} has a damaged header") from None
    if not isinstance(header, dict):
        raise BadWeights(f"{path.name} has a damaged header")
    return header, size - _LENGTH_BYTES - length


def _checked(path: Path, name: str, entry: object) -> tuple[str, int]:
    """A tensor's data type and where its bytes end, once its entry has been found to agree with itself."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            sizes = [n for n in shape if type(n) is int and n >= 0]
            if len(sizes) == len(shape) and _holds(dtype, math.prod(sizes), start, end):
                return dtype, end
    raise BadWeights(f"{path.name} has a damaged header: the entry of {name!r} contradicts itself")


def _holds(dtype: str, count: int, start: int, end: int) -> bool:
    # A type that is not in the table is newer than this code: the reader may know it, so only its range is checked.
    bits = _BITS.get(dtype)
    return 0 <= start <= end and (bits is None or (end - start) * 8 == count * bits)


def tensor_bytes(path: Path) -> list[tuple[str, int]]:
    """Data type and bytes of each tensor of a safetensors file. Raises BadWeights, or OSError if it cannot be read."""
    header, _ = _header(path, path.stat().st_size)
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        match entry:
            case {"dtype": str(dtype), "data_offsets": [int(start), int(end)]}:
                found.append((dtype, end - start))
            case _:
                raise BadWeights(f"{path.name} has a damaged header: the entry of {name!r} contradicts itself")
    return found
