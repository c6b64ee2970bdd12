"""What makes two models the same for a cache: the digest that is the root of every chain key.

Pure reading of a model directory, on the thread that loads the model. Weight files are not read whole: of each, its
name, size, time of modification and header, and of every tensor a few bytes at its start, middle and end. Weights that
are replaced in place under the same name, size and time differ there. Everything else that decides what a token's state
is (config, tokenizer, image processor, model code) is small and read in full.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from omlxd.cache.errors import UnreadableModel

SCHEMA = 1
WEIGHTS = frozenset({".safetensors", ".gguf", ".npz", ".bin"})
DESCRIPTIONS = frozenset({".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"})
# These decide what is sampled or shown, never what state a token leaves behind.
IRRELEVANT = frozenset({"generation_config.json"})
SAMPLE_BYTES = 64
SAMPLES_OF_OTHER_FILES = 64
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What a model's stored state depends on, part by part, so that a difference can be named."""

    weights: str
    description: str
    adapter: str
    layout: str
    kv: str
    precision: str
    block_size: int
    schema: int = SCHEMA

    @property
    def digest(self) -> bytes:
        """32 bytes; equal for equal parts only."""
        parts = [self.weights, self.description, self.adapter, self.layout, self.kv, self.precision]
        text = json.dumps([*parts, self.block_size, self.schema])
        return blake2b(text.encode(), digest_size=32, person=b"omlxd identity").digest()

    def __str__(self) -> str:
        return self.digest.hex()[:16]


def identify(
    model: Path,
    *,
    layout: str,
    block_size: int,
    adapter: Path | None = None,
    kv: str = "",
    precision: str = "",
) -> CacheIdentity:
    """Reads the identity of a model directory.

    `layout` is ModelLayout.signature, `kv` how keys and values are quantised, `precision` what else the loader decides
    about the numbers (data type, backend). Raises UnreadableModel naming a file that is not what it should be.
    """
    return CacheIdentity(
        weights=_digest_of(model, WEIGHTS),
        description=_digest_of(model, DESCRIPTIONS),
        adapter="" if adapter is None else _digest_of(adapter, WEIGHTS | DESCRIPTIONS),
        layout=layout,
        kv=kv,
        precision=precision,
        block_size=block_size,
    )


def _digest_of(directory: Path, suffixes: frozenset[str]) -> str:
    """One digest over the directory's files of these kinds, in order of their names; links are followed."""
    digest = blake2b(digest_size=32)
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix in suffixes and path.is_file())
    except OSError as error:
        raise UnreadableModel(str(directory), error.strerror or "cannot be listed") from error
    for path in paths:
        if path.name in IRRELEVANT:
            continue
        digest.update(f"{len(path.name)}:{path.name}".encode())
        try:
            digest.update(_weights_file(path) if path.suffix in WEIGHTS else _whole(path))
        except OSError as error:
            raise UnreadableModel(str(path), error.strerror or "cannot be read") from error
    return digest.hexdigest()


def _whole(path: Path) -> bytes:
    return blake2b(path.read_bytes(), digest_size=32).digest()


def _weights_file(path: Path) -> bytes:
    stat = path.stat()
    digest = blake2b(f"{stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=32)
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            header = _header(path, file.read(8), stat.st_size)
            text = file.read(header)
            digest.update(text)
            offsets = _tensor_offsets(path, text, 8 + header)
        else:
            offsets = iter(range(0, stat.st_size, max(1, stat.st_size // SAMPLES_OF_OTHER_FILES)))
        for offset in offsets:
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _header(path: Path, length: bytes, size: int) -> int:
    header = int.from_bytes(length, "little")
    if len(length) < 8 or header > min(MAX_HEADER_BYTES, size - 8):
        raise UnreadableModel(str(path), f"its header claims {header} bytes, the file has {size}")
    return header


def _tensor_offsets(path: Path, header: bytes, data: int) -> Iterator[int]:
    """Where to sample: the start, middle and end of each tensor."""
    try:
        tensors = json.loads(header)
        spans = [value["data_offsets"] for name, value in tensors.items() if name != "__metadata__"]
        places = [(int(start), int(stop)) for start, stop in spans]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableModel(str(path), f"its header is not a safetensors header ({error})") from error
    for start, stop in sorted(places):
        yield from (data + start, data + (start + stop) // 2, data + max(start, stop - SAMPLE_BYTES))
