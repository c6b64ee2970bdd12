"""The file of one block or checkpoint: a safetensors file that says itself what it is, and proves it.

Pure functions, for the writer and reader threads. The header's metadata has the schema, the identity, key and parent,
the token ids and pictures, the layout and how the arrays make up the record; its digest covers all of that and the
arrays' bytes. A file is believed only if everything in it agrees, so a torn, flipped, foreign or misplaced one is found
out when it is read, whatever the drive promised when it was written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import mlx.core as mx
import numpy as np

from omlxd.cache.errors import CacheError
from omlxd.cache.keys import BlockSpec, MediaSpan, block_key
from omlxd.cache.layouts import ModelLayout, State
from omlxd.cache.pieces import Piece
from omlxd.cache.store import StoredBlock, StoredCheckpoint

SCHEMA = 1
MAX_HEADER_BYTES = 16 << 20
MAX_TOKENS = 1 << 20  # of one block
MAX_AXES = 8

# safetensors' name of a type, mlx's, and numpy's for its bytes: numpy has no bfloat16, whose bytes pass as uint16.
_TYPES: Sequence[tuple[str, mx.Dtype, str]] = (
    ("BF16", mx.bfloat16, "<u2"),
    ("F16", mx.float16, "<f2"),
    ("F32", mx.float32, "<f4"),
    ("I8", mx.int8, "|i1"),
    ("I16", mx.int16, "<i2"),
    ("I32", mx.int32, "<i4"),
    ("I64", mx.int64, "<i8"),
    ("U8", mx.uint8, "|u1"),
    ("U16", mx.uint16, "<u2"),
    ("U32", mx.uint32, "<u4"),
    ("U64", mx.uint64, "<u8"),
    ("BOOL", mx.bool_, "|b1"),
)
_NAMES = {dtype: name for name, dtype, _ in _TYPES}
_BY_NAME = {name: (dtype, numpy) for name, dtype, numpy in _TYPES}

Record = StoredBlock | StoredCheckpoint


class BadFile(CacheError):
    """A file is not the record that it should be; `reason` says in what."""

    def __init__(self, reason: str, *, other_schema: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.other_schema = other_schema


@dataclass(frozen=True, slots=True)
class Model:
    """What all files of one model have in common. `sliceable` and `recurrent` count its leaves."""

    identity: bytes
    layout: str
    block_size: int
    sliceable: int
    recurrent: int
    name: str = ""  # what people call it

    @classmethod
    def of(cls, layout: ModelLayout, identity: bytes, block_size: int, name: str = "") -> Model:
        return cls(identity, layout.signature, block_size, len(layout.sliceable), len(layout.recurrent), name)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself, checked for form only."""

    identity: bytes
    is_checkpoint: bool
    parent: bytes
    spec: BlockSpec
    layout: str
    block_size: int
    gaps: int
    shape: Any  # of a block: [head, tail, arrays] for each piece; of a checkpoint: for each leaf, which slots are full
    digest: str


def encode(record: Record, model: Model) -> list[bytes]:
    """The file's bytes, in parts. The arrays are evaluated. Raises BadFile for a type that files cannot have."""
    arrays, shape = _taken_apart(record)
    payload = [_bytes(array) for array in arrays]
    spec = record.spec
    said: dict[str, str] = {
        "format": "omlxd",
        "schema": str(SCHEMA),
        "kind": "checkpoint" if isinstance(record, StoredCheckpoint) else "block",
        "identity": model.identity.hex(),
        "key": spec.key.hex(),
        "parent": record.parent.hex(),
        "start": str(spec.start),
        "tokens": spec.tokens.hex(),
        "spans": json.dumps([[span.start, span.stop, span.digest.hex()] for span in spec.spans]),
        "layout": model.layout,
        "block_size": str(model.block_size),
        "gaps": str(missing_rows(record)),
        "shape": json.dumps(shape),
    }
    tensors: dict[str, Any] = {}
    at = 0
    for index, (array, data) in enumerate(zip(arrays, payload, strict=True)):
        offsets = [at, at + len(data)]
        tensors[_name(index)] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        at += len(data)
    said["digest"] = _digest(said, tensors, payload)
    head = json.dumps({"__metadata__": said, **tensors}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return [len(head).to_bytes(8, "little"), head, *payload]


def decode(data: bytes, model: Model, key: bytes) -> Record:
    """The record of a file that must be this model's, under this key. Raises BadFile."""
    header, tensors, start = _read_header(data)
    view = memoryview(data)[start:]
    said = _metadata(data, start)
    if _digest(said, tensors, [view]) != header.digest:
        raise BadFile("its content does not have the digest it was written with")
    _check(header, model, key)
    _check_sizes(tensors, len(view))
    arrays = [_array(tensors, _name(index), view) for index in range(len(tensors))]
    return _put_together(header, model, arrays)


def check(data: bytes, identity: bytes, key: bytes) -> None:
    """Whether a file is whole and in its place, for a model that need not be known. Raises BadFile."""
    header = read_header(data)
    leaves = len(header.shape) if isinstance(header.shape, list) else 0
    decode(data, Model(identity, header.layout, header.block_size, leaves, leaves), key)


def read_header(head: bytes) -> Header:
    """What a file whose first bytes are `head` says it is; believes it. Raises BadFile."""
    return _read_header(head)[0]


def read_tensors(data: bytes) -> tuple[dict[str, str], dict[str, mx.array]]:
    """Any safetensors file's metadata and arrays, for whoever has bounded its size. Raises BadFile."""
    parsed, start = _parsed(data)
    said = parsed.pop("__metadata__", {})
    if not isinstance(said, dict) or not all(isinstance(text, str) for text in said.values()):
        raise BadFile("its metadata is not text")
    view = memoryview(data)[start:]
    _check_sizes(parsed, len(view))
    return said, {name: _array(parsed, name, view) for name in parsed}


def _check_sizes(tensors: Mapping[str, Any], num_bytes: int) -> None:
    """Arrays that share bytes of the file would come to more memory than it has bytes."""
    try:
        ranges = [(int(start), int(stop)) for start, stop in (each["data_offsets"] for each in tensors.values())]
    except (KeyError, ValueError, TypeError) as error:
        raise BadFile("an array's description does not fit its bytes") from error
    if any(start < 0 or stop < start for start, stop in ranges) or sum(b - a for a, b in ranges) > num_bytes:
        raise BadFile(f"its arrays claim other bytes than the {num_bytes} it has")


def missing_rows(record: Record) -> int:
    """How many rows a window leaf lost before its block was cut, over all pieces: fewer is better."""
    return sum(len(piece.gap) for piece in record.pieces) if isinstance(record, StoredBlock) else 0


def _taken_apart(record: Record) -> tuple[list[mx.array], list[Any]]:
    if isinstance(record, StoredCheckpoint):
        slots = [slot for state in record.states for slot in state if slot is not None]
        return slots, [[slot is not None for slot in state] for state in record.states]
    arrays = [array for piece in record.pieces for array in piece.arrays]
    return arrays, [[piece.head, piece.tail, len(piece.arrays)] for piece in record.pieces]


def _put_together(header: Header, model: Model, arrays: list[mx.array]) -> Record:
    rest = iter(arrays)
    try:
        if header.is_checkpoint:
            states: list[State] = [tuple(next(rest) if full else None for full in leaf) for leaf in header.shape]
            record: Record = StoredCheckpoint(header.parent, header.spec, states)
        else:
            pieces = [
                Piece(tuple(next(rest) for _ in range(count)), header.spec.num_tokens, head, tail)
                for head, tail, count in header.shape
            ]
            _check_rows(pieces)
            record = StoredBlock(header.parent, header.spec, pieces)
    except (StopIteration, RuntimeError, TypeError, ValueError) as error:
        raise BadFile("its arrays are not those that its description names") from error
    leaves = model.recurrent if header.is_checkpoint else model.sliceable
    if len(header.shape) != leaves or next(rest, None) is not None:
        raise BadFile(f"it has state of {len(header.shape)} leaves, the model has {leaves}")
    return record


def _check_rows(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        rows = {array.shape[-2] if array.ndim == 4 else -1 for array in piece.arrays}
        whole = min(piece.head, piece.tail) >= 0 and piece.head + piece.tail <= piece.num_tokens
        if not whole or rows != {piece.head + piece.tail}:
            raise BadFile(f"a leaf has {sorted(rows)} rows for {piece.head} and {piece.tail} tokens")


def _check(header: Header, model: Model, key: bytes) -> None:
    if header.identity != model.identity:
        raise BadFile("it belongs to another model, or to another configuration of this one")
    if (header.layout, header.block_size) != (model.layout, model.block_size):
        raise BadFile("it was written for another cache layout")
    spec = header.spec
    if spec.key != key:
        raise BadFile("it is another block than its name says")
    if block_key(header.parent, spec.tokens, spec.spans) != key:
        raise BadFile("its tokens do not give its key")


def _read_header(data: bytes) -> tuple[Header, Mapping[str, Any], int]:
    parsed, start = _parsed(data)
    said = parsed.pop("__metadata__", None)
    if not isinstance(said, dict) or said.get("format") != "omlxd":
        raise BadFile("it is no block file of ours")
    if said.get("schema") != str(SCHEMA):
        raise BadFile(f"it has schema {said.get('schema')!r}, this version reads {SCHEMA}", other_schema=True)
    try:
        spans = tuple(MediaSpan(int(a), int(b), bytes.fromhex(d)) for a, b, d in json.loads(said["spans"]))
        tokens = bytes.fromhex(said["tokens"])
        if not 0 < len(tokens) <= 4 * MAX_TOKENS or len(tokens) % 4:
            raise BadFile(f"it claims {len(tokens)} bytes of token ids")
        header = Header(
            identity=bytes.fromhex(said["identity"]),
            is_checkpoint={"block": False, "checkpoint": True}[said["kind"]],
            parent=bytes.fromhex(said["parent"]),
            spec=BlockSpec(bytes.fromhex(said["key"]), int(said["start"]), tokens, spans),
            layout=said["layout"],
            block_size=int(said["block_size"]),
            gaps=int(said["gaps"]),
            shape=json.loads(said["shape"]),
            digest=said["digest"],
        )
    except (KeyError, ValueError, TypeError) as error:
        raise BadFile(f"its description cannot be read ({type(error).__name__})") from error
    return header, parsed, start


def _parsed(data: bytes) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= MAX_HEADER_BYTES or 8 + length > len(data):
        raise BadFile(f"it has {len(data)} bytes and claims a header of {length}")
    try:
        parsed = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise BadFile("its header is not JSON") from error
    if not isinstance(parsed, dict):
        raise BadFile("its header is no safetensors header")
    return parsed, 8 + length


def _metadata(data: bytes, start: int) -> dict[str, str]:
    said: dict[str, str] = json.loads(data[8:start])["__metadata__"]
    del said["digest"]
    return said


def _digest(said: Mapping[str, str], tensors: Mapping[str, Any], payload: Sequence[bytes | memoryview]) -> str:
    digest = blake2b(digest_size=32, person=b"omlxd file")
    digest.update(json.dumps([said, tensors], sort_keys=True).encode())
    for part in payload:
        digest.update(part)
    return digest.hexdigest()


def _array(tensors: Mapping[str, Any], name: str, view: memoryview) -> mx.array:
    try:
        tensor = tensors[name]
        dtype, numpy = _BY_NAME[tensor["dtype"]]
        start, stop = tensor["data_offsets"]
        return array_of(view[start:stop], dtype, numpy, tensor["shape"])
    except (KeyError, ValueError, TypeError) as error:
        raise BadFile("an array's description does not fit its bytes") from error


def array_of(data: memoryview, dtype: mx.Dtype, numpy: str, shape: Sequence[int]) -> mx.array:
    """An evaluated array that owns its memory. Raises ValueError, TypeError where bytes and shape disagree."""
    if not all(type(length) is int and length >= 0 for length in shape) or len(shape) > MAX_AXES:
        raise ValueError(f"no array has the shape {shape}")
    if len(data) != math.prod(shape) * np.dtype(numpy).itemsize:
        raise ValueError(f"{len(data)} bytes for an array of {list(shape)}")
    array = mx.array(np.ndarray(tuple(shape), dtype=numpy, buffer=data if len(data) else bytearray(8)))
    if array.dtype != dtype:
        array = array.view(dtype)
    mx.eval(array)  # on the thread that made it: others may not
    return array


def _bytes(array: mx.array) -> bytes:
    if array.dtype not in _NAMES:
        raise BadFile(f"{array.dtype} has no place in a safetensors file")
    # The buffer of an evaluated array: nothing is computed, so any thread may do this.
    return memoryview(array).tobytes()  # type: ignore[arg-type]  # mlx's stubs do not know of its buffer


def _name(index: int) -> str:
    return f"{index:04d}"
