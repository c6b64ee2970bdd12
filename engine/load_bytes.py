"""How much memory a model's weights will take, read off its files' headers before any of them is loaded.

Called by the pool on a worker thread; reads no weight. On the CPU half-precision weights are cast to fp32 when they
are loaded (see loader), so they take twice what they take on disk.
"""

from __future__ import annotations

from pathlib import Path

from omlxd.engine.catalog import CatalogEntry
from omlxd.engine.weights import BadWeights, tensor_bytes

HALVES = frozenset({"F16", "BF16"})


def load_bytes(entry: CatalogEntry, *, widens_halves: bool) -> int:
    """The weights' bytes in memory; what the catalog counted where a header cannot be read."""
    try:
        sizes = [size for file in _weight_files(entry.path) for size in tensor_bytes(file)]
    except (BadWeights, OSError):
        return entry.size_bytes  # the load itself will say what is wrong with it
    widened = sum(nbytes for dtype, nbytes in sizes if dtype in HALVES) if widens_halves else 0
    return (sum(nbytes for _, nbytes in sizes) + widened) or entry.size_bytes


def _weight_files(path: Path) -> list[Path]:
    return sorted(each for each in path.glob("model*.safetensors") if not each.name.startswith("."))


def fingerprint(path: Path) -> tuple[tuple[str, int, int], ...]:
    """What tells one state of a model folder from another: names, sizes and times of its weights and its config.

    Empty for a folder that is gone.
    """
    try:
        files = [*_weight_files(path), path / "config.json"]
        return tuple((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files)
    except OSError:
        return ()
