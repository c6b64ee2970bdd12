"""Writes small GGUF files of the llama family, whole or wrong in one place, for the tests of the importer.

Written from the format's description and not with the importer's own reader. Quantised tensors come with the values
that they stand for, computed here from the stored blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 64, 4, 2, 96, 2
ALIGNMENT = 32
F32, F16, Q4_0, Q4_1, Q8_0, Q4_K = 0, 1, 2, 3, 8, 12
U32, I32, FLOAT, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "Ġ t", "Ġt he")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def byte_letters() -> list[str]:
    """The character that byte-level BPE writes for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    odd = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + odd.index(byte)) for byte in range(256)]


TOKENS = [*SPECIAL, *byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]


def metadata() -> dict[str, object]:
    """What a tiny llama's file says; ints are written as U32, floats as 32 bits, lists of ints as I32."""
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the tiny llama, row-major, by its GGUF name."""
    keys = HIDDEN // HEADS * KV_HEADS
    layer = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (keys, HIDDEN),
        "attn_v": (keys, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    blocks = {f"blk.{n}.{name}.weight": shape for n in range(LAYERS) for name, shape in layer.items()}
    return {"token_embd.weight": (len(TOKENS), HIDDEN), **blocks, "output_norm.weight": (HIDDEN,)}


@dataclass
class Stored:
    """One tensor as the file has it, and the values that it stands for."""

    kind: int
    shape: tuple[int, ...]
    data: bytes
    values: np.ndarray


@dataclass
class GgufFile:
    """A file to be written; a test changes what it wants to be wrong."""

    metadata: dict[str, object] = field(default_factory=metadata)
    tensors: dict[str, Stored] = field(default_factory=dict)
    version: int = 3
    offsets: Mapping[str, int] = field(default_factory=dict)  # lies told instead of where a tensor is
    num_tensors: int | None = None
    num_values: int | None = None

    def write(self, path: Path) -> Path:
        head = [b"GGUF", struct.pack("<I", self.version)]
        head.append(struct.pack("<Q", len(self.tensors) if self.num_tensors is None else self.num_tensors))
        head.append(struct.pack("<Q", len(self.metadata) if self.num_values is None else self.num_values))
        head += [_string(key) + _value(value) for key, value in self.metadata.items()]
        data = b""
        for name, tensor in self.tensors.items():
            offset = self.offsets.get(name, len(data))
            dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
            head.append(_string(name) + dims + struct.pack("<IQ", tensor.kind, offset))
            data += _padded(tensor.data)
        path.write_bytes(_padded(b"".join(head)) + data)
        return path


def tiny(kind: int = Q4_1, embedding: int = Q8_0, seed: int = 0) -> GgufFile:
    """A whole file: matrices of one type, the embedding of another, norms in F32 as llama.cpp has them."""
    rng = np.random.default_rng(seed)
    file = GgufFile()
    for name, shape in shapes().items():
        if len(shape) == 1:
            file.tensors[name] = store(np.ones(shape, np.float32), F32)
        else:
            values = rng.normal(size=shape).astype(np.float32) / shape[1] ** 0.5
            file.tensors[name] = store(values, embedding if name == "token_embd.weight" else kind)
    return file


def store(values: np.ndarray, kind: int) -> Stored:
    """Encodes values; the scales are rounded to 16 bits first, so that what is stored is what is claimed."""
    if kind == F32:
        return Stored(kind, values.shape, values.astype("<f4").tobytes(), values)
    if kind == F16:
        half = values.astype("<f2")
        return Stored(kind, values.shape, half.tobytes(), half.astype(np.float32))
    blocks = values.reshape(-1, 32)
    encode = {Q4_0: _q4_0, Q4_1: _q4_1, Q8_0: _q8_0}[kind]
    rows, decoded = encode(blocks)
    return Stored(kind, values.shape, rows.tobytes(), decoded.reshape(values.shape).astype(np.float32))


def _half(values: np.ndarray) -> np.ndarray:
    return values.astype("<f2").astype(np.float32)


def _bytes_of(*columns: np.ndarray) -> np.ndarray:
    return np.concatenate([column.view(np.uint8).reshape(len(column), -1) for column in columns], axis=1)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    return (codes[:, :16] | codes[:, 16:] << 4).astype(np.uint8)


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = _half(np.abs(blocks).max(1, keepdims=True) / 7)
    codes = np.clip(np.rint(blocks / scale) + 8, 0, 15).astype(np.uint8)
    return _bytes_of(scale.astype("<f2"), _nibbles(codes)), (codes.astype(np.float32) - 8) * scale


def _q4_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low = _half(blocks.min(1, keepdims=True))
    scale = _half((blocks.max(1, keepdims=True) - low) / 15)
    codes = np.clip(np.rint((blocks - low) / scale), 0, 15).astype(np.uint8)
    return _bytes_of(scale.astype("<f2"), low.astype("<f2"), _nibbles(codes)), codes * scale + low


def _q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = _half(np.abs(blocks).max(1, keepdims=True) / 127)
    codes = np.clip(np.rint(blocks / scale), -127, 127).astype(np.int8)
    return _bytes_of(scale.astype("<f2"), codes), codes * scale


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", BOOL, value)
        case int():
            return struct.pack("<II", U32, value)
        case float():
            return struct.pack("<If", FLOAT, value)
        case str():
            return struct.pack("<I", STRING) + _string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(_string(each) for each in value)
        case [*numbers]:
            return struct.pack(f"<IIQ{len(numbers)}i", ARRAY, I32, len(numbers), *numbers)
    raise TypeError(f"no GGUF value for {value!r}")
