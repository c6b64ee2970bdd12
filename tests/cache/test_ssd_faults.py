"""Whatever happens to the disk, no wrong token, no failed request, and each mishap is counted."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from omlxd.cache.disk import Disk
from omlxd.cache.hot import HotTier
from omlxd.cache.ssd_volume import INDEX, QUARANTINE
from tests.cache.running import BLOCK, PLENTY, assert_cold, generate, prompt
from tests.cache.shelves import flush, of_model, open_store

TOKENS = prompt(64)  # four blocks


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 1.7e9

    def __call__(self) -> float:
        return self.now


def fill(home: Path, name: str = "llama", tokens=TOKENS, **changes) -> None:
    """Computes and stores a prompt, and stops."""
    store = open_store(home, **changes)
    generate(name, of_model(store, name).cache, tokens, n=2)
    assert store.close(30) == 0


def ask(home: Path, name: str = "llama", tokens=TOKENS, **changes):
    """Asks again in a new process, as it were; the run, which must be the cold one, and the tier's numbers."""
    store = open_store(home, **changes)
    flush(store)
    here = of_model(store, name)
    here.fetch(tokens)
    run = generate(name, here.cache, tokens, n=2)
    assert_cold(name, tokens, run)
    flush(store)
    stats = store.stats()
    store.close(30)
    return run, stats


def files(home: Path, kind: str = "block") -> list[Path]:
    return sorted(home.glob(f"cache/*/*.{kind}.safetensors"))


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    if how == "truncated":
        data = data[:-1]
    elif how == "zero-length":
        data = b""
    elif how == "bit-flipped payload":
        data = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
    elif how == "bit-flipped header":
        data = data[: head - 40] + bytes([data[head - 40] ^ 1]) + data[head - 39 :]
    elif how == "foreign":
        data = b"not a block at all"
    elif how == "zeros":
        data = bytes(len(data))
    elif how in ("older schema", "newer schema"):
        new = "0" if how == "older schema" else "9"
        data = data.replace(b'"schema":"1"', f'"schema":"{new}"'.encode())
    path.write_bytes(data)


SPOILT = ["truncated", "zero-length", "bit-flipped payload", "bit-flipped header", "foreign", "zeros"]


@pytest.mark.parametrize("how", [*SPOILT, "older schema", "newer schema"])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_bad_file_is_a_miss_from_there_on(name, how, tmp_path):
    fill(tmp_path, name)
    for path in [*files(tmp_path), *files(tmp_path, "checkpoint")]:
        spoil(path, how)
    asked = [*TOKENS, 1]
    run, stats = ask(tmp_path, name, asked)
    assert run.cached_tokens == 0
    assert stats.counts["bad"] >= 1
    assert len(list((tmp_path / "cache" / QUARANTINE).iterdir())) >= 1
    again, _ = ask(tmp_path, name, [*asked, 2])
    assert again.cached_tokens == len(
        asked
    )  # all of it has been computed and stored again, not the first bad block only


def test_a_match_ends_before_the_bad_block_and_says_so(tmp_path):
    fill(tmp_path)
    by_start = {json.loads(head(path))["__metadata__"]["start"]: path for path in files(tmp_path)}
    spoil(by_start[str(2 * BLOCK)], "truncated")
    store = open_store(tmp_path)
    here = of_model(store, "llama")
    here.fetch(TOKENS)
    standing = here.cache.standing(TOKENS)
    assert standing.position == 2 * BLOCK
    assert here.view.ends_in_bad_file(standing, standing.position)
    store.close(30)


def head(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def test_a_right_name_with_anothers_content_is_a_miss(tmp_path):
    fill(tmp_path)
    first, second, *_ = files(tmp_path)
    shutil.copy(second, first)
    run, stats = ask(tmp_path)
    assert run.cached_tokens <= len(TOKENS) - 1
    assert stats.counts["bad"] == 1


def test_another_models_file_in_the_right_place_is_a_miss(tmp_path):
    fill(tmp_path)
    store = open_store(tmp_path)
    other = of_model(store, "llama", root=b"\1" * 32)
    generate("llama", other.cache, TOKENS, n=2)
    store.close(30)
    mine, others = tmp_path / "cache" / ("00" * 32), tmp_path / "cache" / ("01" * 32)
    for own, foreign in zip(sorted(mine.iterdir()), sorted(others.iterdir()), strict=True):
        shutil.copy(foreign, own)
    run, stats = ask(tmp_path)
    assert run.cached_tokens == 0
    assert stats.counts["bad"] >= 1


def test_a_lost_index_is_made_again_from_the_files(tmp_path):
    fill(tmp_path)
    for path in (tmp_path / "cache").glob(f"{INDEX}*"):
        path.unlink()
    run, stats = ask(tmp_path)
    assert run.cached_tokens == len(TOKENS) - 1
    assert stats.counts["files_without_entry"] >= 4
    assert stats.counts["index_rebuilt"] == 1
    assert ask(tmp_path)[1].counts["index_rebuilt"] == 0


@pytest.mark.parametrize("damage", [b"not a database at all, but long enough to be taken for one" * 100, b""])
def test_a_broken_index_is_made_again_from_the_files(tmp_path, damage):
    fill(tmp_path)
    (tmp_path / "cache" / INDEX).write_bytes(damage)
    run, stats = ask(tmp_path)
    assert run.cached_tokens == len(TOKENS) - 1
    assert stats.counts["files_without_entry"] >= 4


def test_an_index_that_breaks_while_it_is_used_is_made_again(tmp_path):
    clock = Clock()
    fill(tmp_path)
    store = open_store(tmp_path, clock=clock)
    flush(store)
    index = tmp_path / "cache" / INDEX
    data = index.read_bytes()
    index.write_bytes(data[:100] + b"\xff" * (len(data) - 100))
    here = of_model(store, "llama")
    for seed in range(1, 4):
        here.fetch(prompt(64, seed))
        assert_cold("llama", prompt(64, seed), generate("llama", here.cache, prompt(64, seed), n=2))
        flush(store)
        clock.now += 1000
    flush(store)
    fresh = of_model(store, "llama")
    fresh.fetch(TOKENS)
    assert fresh.cache.match_length(TOKENS) == len(TOKENS) - 1
    store.close(30)


def test_an_entry_without_its_file_is_a_miss_and_goes(tmp_path):
    fill(tmp_path)
    for path in files(tmp_path):
        path.unlink()
    run, stats = ask(tmp_path)
    assert run.cached_tokens == 0
    assert stats.counts["entries_without_file"] >= 4


def test_a_file_that_is_not_ours_is_left_alone_and_reported(tmp_path):
    fill(tmp_path)
    folder = files(tmp_path)[0].parent
    strangers = [tmp_path / "cache" / "holiday.jpg", folder / "notes.txt", folder / "x.safetensors"]
    for path in strangers:
        path.write_text("mine")
    (tmp_path / "cache" / "folder").mkdir()
    _, stats = ask(tmp_path, max_bytes=1)
    assert stats.counts["foreign"] == 4
    assert all(path.read_text() == "mine" for path in strangers)


def test_what_a_crash_left_half_written_is_removed(tmp_path):
    fill(tmp_path)
    whole = files(tmp_path)[0]
    left = whole.with_name(whole.name.replace(".block.", ".block.part."))
    left.write_bytes(whole.read_bytes()[:100])
    run, stats = ask(tmp_path)
    assert run.cached_tokens == len(TOKENS) - 1
    assert stats.counts["leftovers"] == 1
    assert not left.exists()


# -- a disk that fails ------------------------------------------------------------------------------------------------


class FullDisk(Disk):
    """Has room for nothing while `is_full`."""

    def __init__(self) -> None:
        self.is_full = True

    def fill(self, fd, parts):
        if self.is_full:
            os.write(fd, b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().fill(fd, parts)


def test_a_full_disk_pauses_the_tier_and_old_blocks_still_hit(tmp_path, caplog):
    fill(tmp_path)
    disk, clock = FullDisk(), Clock()
    store = open_store(tmp_path, disk=disk, clock=clock)
    here = of_model(store, "llama")
    for seed in range(1, 31):
        tokens = prompt(64, seed)
        assert_cold("llama", tokens, generate("llama", here.cache, tokens, n=2))
        clock.now += 1
    flush(store)
    assert (store.stats().state, store.stats().reason) == ("paused", "No space left on device")
    assert len(files(tmp_path)) < 10
    here.fetch(TOKENS)
    assert here.cache.match_length(TOKENS) == len(TOKENS) - 1
    disk.is_full = False
    clock.now += 1000
    for seed in range(31, 36):
        tokens = prompt(64, seed)
        assert_cold("llama", tokens, generate("llama", here.cache, tokens, n=2))
    flush(store)
    assert (store.stats().state, store.stats().reason) == ("on", None)
    assert store.close(30) == 0
    assert len([record for record in caplog.records if record.name.startswith("omlxd.cache")]) <= 5
    run, _ = ask(tmp_path, tokens=prompt(64, 3))  # computed while the disk was full, and written when it was not
    assert run.cached_tokens == 63


def test_the_directory_may_go_while_the_daemon_runs(tmp_path):
    clock = Clock()
    store = open_store(tmp_path, clock=clock)
    here = of_model(store, "llama")
    generate("llama", here.cache, TOKENS, n=2)
    flush(store)
    shutil.rmtree(tmp_path / "cache")
    tokens = prompt(64, 1)
    assert_cold("llama", tokens, generate("llama", here.cache, tokens, n=2))
    flush(store)
    assert store.stats().state == "paused"
    clock.now += 1000
    later = prompt(64, 2)
    assert_cold("llama", later, generate("llama", here.cache, later, n=2))
    flush(store)
    assert store.stats().state == "on"
    store.close(30)
    assert ask(tmp_path, tokens=later)[0].cached_tokens == 63


class Elsewhere(Disk):
    """The tier's directory is on a drive of its own, while that is plugged in."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.is_there = True

    def device(self, path: Path) -> int:
        return 99 if self.is_there and self.directory in (path, *path.parents) else 1


def test_an_unplugged_drive_is_waited_for_and_never_replaced(tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    disk, clock = Elsewhere(mount), Clock()
    fill(tmp_path, directory=mount / "cache", disk=disk)
    (mount / "cache").rename(tmp_path / "unplugged")
    disk.is_there = False
    store = open_store(tmp_path, directory=mount / "cache", disk=disk, clock=clock)
    here = of_model(store, "llama")
    assert_cold("llama", TOKENS, generate("llama", here.cache, TOKENS, n=2))
    flush(store)
    assert store.stats().state == "paused"
    assert "not mounted" in store.stats().reason
    assert list(mount.iterdir()) == []
    (tmp_path / "unplugged").rename(mount / "cache")
    disk.is_there = True
    clock.now += 1000
    other = prompt(64, 1)
    generate("llama", here.cache, other, n=2)
    flush(store)
    assert store.stats().state == "on"
    store.close(30)


def test_a_directory_that_cannot_be_made_leaves_memory_alone(tmp_path):
    (tmp_path / "file").write_text("x")
    for directory in (tmp_path / "file" / "cache", tmp_path / "missing" / "drive" / "cache"):
        store = open_store(tmp_path, directory=directory)
        here = of_model(store, "llama")
        assert_cold("llama", TOKENS, generate("llama", here.cache, TOKENS, n=2))
        assert_cold("llama", TOKENS, generate("llama", here.cache, TOKENS, n=2))
        flush(store)
        assert store.stats().state == "paused"
        assert str(directory.parent) in store.stats().reason
        store.close(30)
    assert not (tmp_path / "missing").exists()


class ReadOnlyDisk(Disk):
    def make_directory(self, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def test_a_read_only_directory_is_said(tmp_path):
    store = open_store(tmp_path, disk=ReadOnlyDisk())
    here = of_model(store, "llama")
    assert_cold("llama", TOKENS, generate("llama", here.cache, TOKENS, n=2))
    flush(store)
    assert "cannot be written: Read-only file system" in store.stats().reason
    store.close(30)


def test_a_second_process_reads_and_says_so(tmp_path):
    owner = open_store(tmp_path)
    generate("llama", of_model(owner, "llama").cache, TOKENS, n=2)
    flush(owner)
    second = open_store(tmp_path)
    here = of_model(second, "llama")
    here.fetch(TOKENS)
    run = generate("llama", here.cache, TOKENS, n=2)
    assert run.cached_tokens == len(TOKENS) - 1
    flush(second)
    assert second.stats().state == "read_only"
    assert str(os.getpid()) in second.stats().reason
    second.close(30)
    owner.close(30)


# -- limits -----------------------------------------------------------------------------------------------------------


def size_of(home: Path) -> int:
    return sum(path.stat().st_size for path in home.glob("cache/*/*.safetensors"))


def test_one_cap_holds_for_all_models_and_what_was_used_last_stays(tmp_path):
    fill(tmp_path)
    one = size_of(tmp_path)
    store = open_store(tmp_path, max_bytes=3 * one)
    for seed in range(1, 6):
        for root in (bytes(32), b"\1" * 32):
            here = of_model(store, "llama", root=root)
            generate("llama", here.cache, prompt(64, seed), n=2)
            flush(store)
            assert size_of(tmp_path) <= 3 * one
            keep = of_model(store, "llama")
            assert keep.fetch(TOKENS) > 0
            keep.cache.lookup(TOKENS).release()
            flush(store)
    assert store.stats().counts["evicted"] > 0
    store.close(30)


def test_a_lowered_cap_takes_effect_and_recency_outlives_a_restart(tmp_path):
    for seed in range(4):
        fill(tmp_path, tokens=prompt(64, seed), clock=lambda seed=seed: 1.7e9 + seed)
    one = size_of(tmp_path) // 4
    store = open_store(tmp_path, clock=lambda: 1.7e9 + 10)
    here = of_model(store, "llama")
    here.fetch(prompt(64, 0))
    here.cache.lookup(prompt(64, 0)).release()
    store.close(30)
    store = open_store(tmp_path, max_bytes=2 * one + 100, clock=lambda: 1.7e9 + 20)
    flush(store)
    assert size_of(tmp_path) <= 2 * one + 100
    found = []
    for seed in range(4):
        here = of_model(store, "llama")
        here.fetch(prompt(64, seed))
        found.append(here.cache.match_length(prompt(64, seed)) == 63)
    store.close(30)
    assert found == [True, False, False, True]


def test_a_floor_of_free_space_is_kept(tmp_path):
    class Small(Disk):
        def free_bytes(self, path: Path) -> int:
            return 100_000 - size_of(tmp_path)

    store = open_store(tmp_path, disk=Small(), min_free_bytes=40_000)
    here = of_model(store, "llama")
    for seed in range(8):
        generate("llama", here.cache, prompt(64, seed), n=2)
    flush(store)
    assert size_of(tmp_path) <= 60_000
    assert store.stats().counts["evicted"] > 0
    store.close(30)


def test_files_of_another_schema_are_inside_the_cap_and_go_first(tmp_path):
    fill(tmp_path)
    for path in files(tmp_path):
        spoil(path, "older schema")
    (tmp_path / "cache" / INDEX).unlink()
    old = size_of(tmp_path)
    store = open_store(tmp_path, max_bytes=old + 100)
    flush(store)
    assert store.stats().counts["incompatible"] == len(files(tmp_path))
    here = of_model(store, "llama", root=b"\1" * 32)
    generate("llama", here.cache, prompt(64, 1), n=2)
    flush(store)
    assert size_of(tmp_path) <= old + 100
    fresh = of_model(store, "llama", root=b"\1" * 32)
    fresh.fetch(prompt(64, 1))
    assert fresh.cache.match_length(prompt(64, 1)) == 63
    store.close(30)


def test_a_full_queue_loses_nothing_that_memory_still_has(tmp_path):
    store = open_store(tmp_path, queue_bytes=10_000)
    here = of_model(store, "llama")
    prompts = [prompt(64, seed) for seed in range(10)]
    for tokens in prompts:
        generate("llama", here.cache, tokens, n=2)
    assert store.close(30) == 0
    for tokens in prompts:
        assert ask(tmp_path, tokens=tokens)[0].cached_tokens == 63


def test_with_no_room_in_memory_what_the_queue_refused_is_counted(tmp_path):
    store = open_store(tmp_path, queue_bytes=0)
    here = of_model(store, "llama", HotTier(PLENTY))
    here.view.feed_from(lambda names: [])  # as if it had been dropped before anybody asked
    generate("llama", here.cache, TOKENS, n=2)
    flush(store)
    assert store.stats().counts["dropped"] == 5
    assert store.close(30) == 0


class Counting(Disk):
    """Counts what is opened."""

    def __init__(self) -> None:
        self.opened = 0

    def read(self, path):
        self.opened += 1
        return super().read(path)

    def head(self, path, num_bytes):
        self.opened += 1
        return super().head(path, num_bytes)


def test_a_start_opens_no_block_file_and_neither_does_a_second_model(tmp_path):
    fill(tmp_path)
    disk = Counting()
    store = open_store(tmp_path, disk=disk)
    flush(store)
    of_model(store, "llama")
    of_model(store, "llama", root=b"\1" * 32)
    flush(store)
    assert disk.opened == 0
    assert store.stats().used_bytes == size_of(tmp_path)
    store.close(30)


def test_a_longer_block_takes_the_place_of_the_shorter_ones_it_contains(tmp_path):
    store = open_store(tmp_path)
    here = of_model(store, "llama")
    for length in (20, 25, 30):
        generate("llama", here.cache, prompt(length), n=1)
    flush(store)
    assert len(files(tmp_path)) == 2
    store.close(30)
    assert ask(tmp_path, tokens=prompt(40))[0].cached_tokens == 30


def test_a_stop_without_time_says_how_much_it_dropped(tmp_path, caplog):
    class Stuck(Disk):
        def __init__(self) -> None:
            self.writing, self.go_on = threading.Event(), threading.Event()

        def fill(self, fd, parts):
            self.writing.set()
            assert self.go_on.wait(60)
            super().fill(fd, parts)

    disk = Stuck()
    store = open_store(tmp_path, disk=disk)
    generate("llama", of_model(store, "llama").cache, TOKENS, n=2)
    assert disk.writing.wait(60)
    dropped = store.close(0)
    disk.go_on.set()
    assert dropped == 5
    assert "5 blocks of the cache" in caplog.text


# -- kill -9 ----------------------------------------------------------------------------------------------------------

SEAMS = ["after open", "half written", "before rename", "after rename", "before commit"]
CHILD = """
import os, signal, sys
from pathlib import Path
from omlxd.cache.disk import Disk
from omlxd.cache.ssd_index import Index
from tests.cache.shelves import of_model, open_store, flush
from tests.cache.running import generate, prompt
seam, home = sys.argv[1], Path(sys.argv[2])
class Deadly(Disk):
    count = 0
    def die(self, where):
        if where == seam and Deadly.count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    def fill(self, fd, parts):
        Deadly.count += 1
        self.die("after open")
        parts = list(parts)
        if seam == "half written" and Deadly.count == 3:
            os.write(fd, parts[0]); os.write(fd, parts[1][:100]); self.die(seam)
        super().fill(fd, parts)
    def rename(self, old, new):
        self.die("before rename")
        super().rename(old, new)
        self.die("after rename")
        self.die("before commit")
store = open_store(home, disk=Deadly())
generate("llama", of_model(store, "llama").cache, prompt(64), n=2, chunk=16)
flush(store)
"""


@pytest.mark.parametrize("seam", SEAMS)
def test_a_kill_at_any_point_of_a_write_costs_that_write_at_most(seam, tmp_path):
    ended = subprocess.run([sys.executable, "-c", CHILD, seam, str(tmp_path)], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    run, stats = ask(tmp_path)
    assert run.cached_tokens >= 2 * BLOCK
    assert stats.counts["bad"] == 0
    assert not list(tmp_path.glob("cache/*/*.part.*"))
    assert ask(tmp_path)[0].cached_tokens == 63
