"""Removing a pulled model: its folder goes, and nobody else's ever does."""

from __future__ import annotations

from pathlib import Path

import pytest

from omlxd.engine.api import Unsupported
from omlxd.engine.pull import NOTE
from omlxd.engine.removal import remove_pulled


def folder(path: Path, *, pulled: bool) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_bytes(b"x" * 10)
    (path / "model.safetensors").write_bytes(b"x" * 90)
    if pulled:
        (path / NOTE).write_bytes(b"")
    return path


def test_a_pulled_model_goes_with_the_emptied_folder_above_it(tmp_path: Path) -> None:
    gone, kept = folder(tmp_path / "org" / "m", pulled=True), folder(tmp_path / "other" / "m", pulled=True)
    assert remove_pulled(gone, tmp_path) == 100
    assert not (tmp_path / "org").exists()
    assert kept.exists()


def test_a_neighbour_keeps_the_folder_above(tmp_path: Path) -> None:
    gone, kept = folder(tmp_path / "org" / "m", pulled=True), folder(tmp_path / "org" / "n", pulled=True)
    remove_pulled(gone, tmp_path)
    assert kept.exists()
    remove_pulled(kept, tmp_path)
    assert tmp_path.exists()


def test_what_was_not_pulled_stays(tmp_path: Path) -> None:
    mine = folder(tmp_path / "models" / "m", pulled=False)
    outside = folder(tmp_path / "elsewhere", pulled=True)
    link = tmp_path / "models" / "link"
    link.symlink_to(outside)
    for path in (mine, outside, link):
        with pytest.raises(Unsupported, match="not pulled"):
            remove_pulled(path, tmp_path / "models")
    assert (outside / "model.safetensors").exists()
    assert mine.exists()
