"""The tier on file systems as they are: one that fills up, one that is read only, and one with very many files."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omlxd.cache.disk import Disk
from omlxd.cache.ssd_index import BLOCK, Entry, Index
from omlxd.cache.ssd_volume import INDEX
from tests.cache.running import PLENTY, assert_cold, generate, prompt
from tests.cache.shelves import flush, of_model, open_store
from tests.cache.test_ssd_faults import Clock

MANY = 20_000
TOKENS = prompt(64)


@contextmanager
def mounted(place: Path, options: str) -> Iterator[None]:
    """A file system in memory at `place`; skips the test where nobody may mount one."""
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "omlxd-test", place]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system may be mounted here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def mount_point(tmp_path: Path) -> Path:
    if os.geteuid() or not Path("/proc/self/mounts").exists():
        pytest.skip("only root on Linux mounts file systems")
    return tmp_path / "mount"


def answered(here, seed: int) -> None:
    tokens = prompt(64, seed)
    assert_cold("llama", tokens, generate("llama", here.cache, tokens, n=2))


def test_a_small_disk_that_fills_up_pauses_the_tier_and_one_that_grows_ends_that(mount_point, tmp_path, caplog):
    """CASES PS-05, with a real ENOSPC: every prompt is answered, what is there still hits, and the log stays short."""
    with mounted(mount_point, "size=512k"):
        clock = Clock()
        store = open_store(tmp_path, directory=mount_point / "cache", clock=clock)
        here = of_model(store, "llama")
        generate("llama", here.cache, TOKENS, n=2)
        flush(store)
        for seed in range(1, 31):
            answered(here, seed)
        flush(store)
        assert store.stats().state == "paused"
        assert re.search("No space left on device|disk is full", str(store.stats().reason))  # the second is sqlite's
        fresh = of_model(store, "llama")
        fresh.fetch(TOKENS)
        assert fresh.cache.match_length(TOKENS) == len(TOKENS) - 1
        here.view.feed_from(here.cache.offers)  # it is this one's blocks that could not be written
        assert not list(mount_point.glob("cache/*/*.part.*"))
        subprocess.run(["mount", "-o", "remount,size=64m", mount_point], check=True)
        clock.now += 1000
        for seed in range(31, 36):
            answered(here, seed)
        flush(store)
        assert (store.stats().state, store.stats().reason) == ("on", None)
        assert store.close(30) == 0
        assert len([record for record in caplog.records if record.name.startswith("omlxd.cache")]) <= 5
        store = open_store(tmp_path, directory=mount_point / "cache")
        for tokens in (TOKENS, prompt(64, 7), prompt(64, 33)):  # before, while and after it was full
            here = of_model(store, "llama")
            here.fetch(tokens)
            assert here.cache.match_length(tokens) == 63
        store.close(30)


def test_a_read_only_disk_is_said_and_its_files_answer_nobody(mount_point, tmp_path):
    """CASES PS-07: it may be somebody else's, and without its lock nobody knows who writes there."""
    with mounted(mount_point, "size=8m"):
        subprocess.run(["mount", "-o", "remount,ro", mount_point], check=True)
        store = open_store(tmp_path, directory=mount_point / "cache")
        here = of_model(store, "llama")
        answered(here, 1)
        answered(here, 1)
        flush(store)
        assert store.stats().state == "paused"
        assert "Read-only file system" in str(store.stats().reason)
        assert here.cache.stats().hits == 1  # memory works
        store.close(30)


class Counted(Disk):
    """Counts the files that are opened."""

    def __init__(self) -> None:
        self.opened = 0

    def read(self, path: Path) -> bytes:
        self.opened += 1
        return super().read(path)

    def head(self, path: Path, num_bytes: int) -> bytes:
        self.opened += 1
        return super().head(path, num_bytes)


def fill_with_many(directory: Path) -> None:
    """Entries and (empty) files of 256 models."""
    directory.mkdir(mode=0o700)
    index = Index(directory / INDEX)
    index.begin()
    for number in range(MANY):
        identity, key = f"{number % 256:064x}", number.to_bytes(32, "big")
        if number < 256:
            (directory / identity).mkdir()
        index.add(Entry(0, identity, BLOCK, key, bytes(32), 0, bytes(64), 0, 1000), used=number)
        os.close(os.open(directory / identity / f"{key.hex()}.block.safetensors", os.O_CREAT | os.O_WRONLY))
    index.commit()
    index.close()


def test_very_many_files_are_opened_neither_at_a_start_nor_for_another_model(tmp_path):
    """CASES PS-17: the first prompts are answered and stored while the names are still being compared."""
    fill_with_many(tmp_path / "cache")
    disk = Counted()
    store = open_store(tmp_path, max_bytes=PLENTY, disk=disk)
    for root in (bytes(32), b"\1" * 32):
        here = of_model(store, "llama", root=root)
        here.fetch(TOKENS)
        assert_cold("llama", TOKENS, generate("llama", here.cache, TOKENS, n=2))
    flush(store)
    assert disk.opened == 0
    counts = store.stats().counts
    assert counts["written"] == 10
    assert (counts["entries_without_file"], counts["files_without_entry"], counts["foreign"]) == (0, 0, 0)
    assert store.stats().used_bytes > MANY * 1000
    store.close(30)
