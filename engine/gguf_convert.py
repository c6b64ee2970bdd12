"""The process that turns a GGUF file into an MLX model folder: `python -m omlxd.engine.gguf_convert SOURCE FOLDER`.

Started by `engine/gguf.py` and by nothing else, because MLX's reader of GGUF is C++ that a damaged file may crash and
because what it allocates should leave with it. Says on stdout, one JSON object a line, how far it is (`done`, `total`
bytes) and last how it ended: `ok`, `bad`, `unsupported` or `storage`.
"""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from omlxd.engine.api import Unsupported
from omlxd.engine.gguf_header import TYPES, BadGguf, UnknownTensorType, read_header
from omlxd.engine.gguf_llama import mlx_config, mlx_name
from omlxd.engine.gguf_tokenizer import write_tokenizer

Report = Callable[[int, int], None]
_IMPORTED = f"{', '.join(kind.name for kind in TYPES.values())} are imported"


def convert(source: Path, folder: Path, report: Report) -> None:
    """Fills an empty folder. Raises BadGguf, UnknownTensorType, Unsupported or OSError."""
    header = read_header(source)
    config = mlx_config(header)
    context, vocab_size = config["max_position_embeddings"], config["vocab_size"]
    assert isinstance(context, int)
    assert isinstance(vocab_size, int)
    ends = write_tokenizer(header.metadata, folder, context_tokens=context, vocab_size=vocab_size)
    _write_weights(source, folder / "model.safetensors", report)
    _write_json(folder / "generation_config.json", {"eos_token_id": ends})
    _write_json(folder / "config.json", config | {"eos_token_id": ends})


def _write_weights(source: Path, target: Path, report: Report) -> None:
    loaded = mx.load(str(source), format="gguf")
    assert isinstance(loaded, dict)
    widest = mx.float32 if all(array.dtype == mx.float32 for array in loaded.values()) else mx.float16
    total, done = sum(array.nbytes for array in loaded.values()), 0
    weights: dict[str, mx.array] = {}
    for name in list(loaded):
        array = _narrowed(loaded.pop(name), widest)
        weights[mlx_name(name)] = array
        done += array.nbytes
        report(min(done, total), total)
    _save(target, weights, total)
    report(total, total)


def _save(target: Path, weights: dict[str, mx.array], num_bytes: int) -> None:
    try:
        mx.save_safetensors(str(target), weights, {"format": "mlx"})
    except RuntimeError as error:  # MLX does not say why it could not write
        free = shutil.disk_usage(target.parent).free
        reason = f"{num_bytes} bytes could not be written, {free} are free; free some space and pull again"
        raise OSError(errno.EIO, reason, str(target)) from error


def _narrowed(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """GGUF keeps norms in fp32 whatever the rest is; one such norm makes every activation after it fp32, twice as wide.

    Narrowed only where no value changes.
    """
    if array.dtype != mx.float32 or dtype == mx.float32:
        return array
    narrow = array.astype(dtype)
    return narrow if mx.array_equal(narrow.astype(mx.float32), array) else array


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def main(source: str, folder: str) -> None:
    mx.set_default_device(mx.cpu)
    try:
        convert(Path(source), Path(folder), lambda done, total: _say(done=done, total=total))
    except BadGguf as error:
        _say(bad=str(error))
    except UnknownTensorType as error:
        _say(unsupported=[f"GGUF tensor type {error.name}", f"{error.tensor} has it; {_IMPORTED}"])
    except Unsupported as error:
        _say(unsupported=[error.fields["what"], error.fields["reason"]])
    except OSError as error:
        _say(storage=[str(error.filename or folder), error.strerror or str(error)])
    else:
        _say(ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
