"""Removing a model that was pulled: its folder, and the emptied one above it. Called on a worker thread."""

from __future__ import annotations

import shutil
from pathlib import Path

from omlxd.engine.api import StorageFailed, Unsupported
from omlxd.engine.pull import NOTE


def remove_pulled(path: Path, models_dir: Path) -> int:
    """Deletes a model folder below `models_dir` that `pull` has made; returns its bytes.

    Raises Unsupported for any other folder, StorageFailed where it cannot be deleted.
    """
    root = models_dir.resolve()
    if path.is_symlink() or root not in path.resolve().parents or not (path / NOTE).is_file():
        raise Unsupported(f"removing {path.name}", "it was not pulled by omlxd; delete its folder yourself")
    try:
        size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        shutil.rmtree(path)
        above = path.parent
        if above.resolve() != root and not any(above.iterdir()):
            above.rmdir()
    except OSError as error:
        raise StorageFailed(str(path), f"it cannot be removed: {error.strerror}") from error
    return size
