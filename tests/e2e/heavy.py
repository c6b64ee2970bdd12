"""A tiny model whose cache is heavy, so that memory runs short in a test; and the memory of a process, sampled."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.models import build, write

CONTEXT = 2048
WIDE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 256}
KV_BYTES_PER_TOKEN = 4 * 2 * 8 * 256 * 4  # layers, K and V, heads, width, fp32: 64 KiB


FAT = {"intermediate_size": 32_768}  # two layers of three matrices of 64 x 32768: 50 MB


def write_heavy(directory: Path, *, seed: int = 0) -> Path:
    """A llama whose every token takes KV_BYTES_PER_TOKEN of cache."""
    return _write(directory, WIDE, seed)


def write_fat(directory: Path, *, seed: int = 0) -> Path:
    """A llama of 50 MB with a light cache."""
    return _write(directory, FAT, seed)


def _write(directory: Path, changes: dict[str, int], seed: int) -> Path:
    folder = write("llama", directory, seed=seed, context=CONTEXT, eos=[])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    model = build("llama", seed, context=CONTEXT, **changes)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def anonymous_bytes(pid: int) -> int:
    """What the process has of memory that is no file's."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


class Sampled:
    """The most that was seen."""

    most = 0


@contextmanager
def sampling(pid: int, *, every_s: float = 0.02) -> Iterator[Sampled]:
    """Watches a process's memory meanwhile."""
    seen, over = Sampled(), threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            seen.most = max(seen.most, anonymous_bytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()
