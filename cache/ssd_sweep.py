"""Setting the index and the files of the SSD tier straight, a little at a time.

Runs on the writer thread, between its other work: `sweep` is a generator that does one small piece at each `next`. What
the index does not know is read for its header and entered; what it knows and the disk has not is taken out; what a
crash left half written is removed. A file that is not ours by its name is left where it is, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from omlxd.cache.disk import Disk
from omlxd.cache.ssd_format import MAX_HEADER_BYTES, BadFile, Header, read_header
from omlxd.cache.ssd_index import ALIEN, Entry, entry_of
from omlxd.cache.ssd_volume import FILE, IDENTITY, LEFTOVER, OURS, QUARANTINE, Volume
from omlxd.cache.store import BLOCK, CHECKPOINT

AT_ONCE = 64  # files between two pauses
HEAD_BYTES = 64 << 10
MOST_QUARANTINED = 16


def sweep(volume: Volume, disk: Disk, counts: Counter[str]) -> Iterator[None]:
    """Raises OSError and sqlite3.Error, as all use of a volume may."""
    counts["foreign"] = counts["incompatible"] = 0
    known = set(volume.index.identities())
    for found in list(disk.list(volume.place.directory)):
        if IDENTITY.fullmatch(found.name) and found.is_dir(follow_symlinks=False):
            known.discard(found.name)
            yield from _directory(volume, disk, counts, found.name)
        else:
            counts["foreign"] += found.name not in OURS
        yield
    for identity in known:
        yield from _lost(volume, counts, identity, volume.index.keys(identity))


def _directory(volume: Volume, disk: Disk, counts: Counter[str], identity: str) -> Iterator[None]:
    missing = volume.index.keys(identity)
    for number, found in enumerate(disk.list(volume.place.directory / identity)):
        match = FILE.fullmatch(found.name)
        if match is not None:
            key, kind = bytes.fromhex(match[1]), BLOCK if match[2] == "block" else CHECKPOINT
            if (kind, key) in missing:
                missing.discard((kind, key))
            elif (ALIEN, key) in missing:
                missing.discard((ALIEN, key))
                counts["incompatible"] += 1
            else:
                _enter(volume, disk, counts, Path(found.path), identity=identity, kind=kind, key=key)
        elif LEFTOVER.fullmatch(found.name):
            disk.remove(Path(found.path))
            counts["leftovers"] += 1
        else:
            counts["foreign"] += 1
        if number % AT_ONCE == AT_ONCE - 1:
            yield
    yield from _lost(volume, counts, identity, missing)


def _lost(volume: Volume, counts: Counter[str], identity: str, missing: set[tuple[int, bytes]]) -> Iterator[None]:
    for number, (kind, key) in enumerate(missing):
        entry = volume.index.find(identity, kind, key)
        if entry is not None and not _files(volume, entry):
            volume.index.remove(entry)
            counts["entries_without_file"] += 1
        if number % AT_ONCE == AT_ONCE - 1:
            yield


def _files(volume: Volume, entry: Entry) -> list[Path]:
    kinds = (BLOCK, CHECKPOINT) if entry.kind == ALIEN else (entry.kind,)
    paths = [volume.place.file(entry.identity, kind, entry.key) for kind in kinds]
    return [path for path in paths if path.exists()]


def _enter(
    volume: Volume, disk: Disk, counts: Counter[str], path: Path, *, identity: str, kind: int, key: bytes
) -> None:
    if volume.index.find(identity, kind, key) is not None:
        return  # written since the index was asked
    stat = path.stat()
    try:
        header = _header(disk, path)
        if (header.identity.hex(), header.spec.key, header.is_checkpoint) != (identity, key, kind == CHECKPOINT):
            raise BadFile("it is not the file that its name says")
    except BadFile as bad:
        if bad.other_schema:
            counts["incompatible"] += 1
            volume.index.add(Entry(0, identity, ALIEN, key, b"", 0, b"", 0, stat.st_size), used=0.0)
        else:
            counts["bad"] += 1
            quarantine(volume.place.directory, disk, path)
        return
    counts["files_without_entry"] += 1
    entry = entry_of(
        header.spec,
        header.parent,
        identity=identity,
        is_checkpoint=header.is_checkpoint,
        gaps=header.gaps,
        nbytes=stat.st_size,
    )
    volume.index.add(entry, used=stat.st_mtime, pictures=bool(header.spec.spans))


def _header(disk: Disk, path: Path) -> Header:
    head = disk.head(path, HEAD_BYTES)
    length = int.from_bytes(head[:8], "little")
    if HEAD_BYTES < 8 + length <= MAX_HEADER_BYTES:
        head = disk.head(path, 8 + length)
    return read_header(head)


def quarantine(directory: Path, disk: Disk, path: Path) -> None:
    """Puts a bad file aside, for whoever wants to know what happened to it; of many, the latest. Raises OSError."""
    aside = directory / QUARANTINE
    disk.make_directory(aside)
    disk.rename(path, aside / f"{path.parent.name[:16]}-{path.name}")
    kept = sorted((entry for entry in disk.list(aside) if entry.is_file()), key=lambda entry: entry.stat().st_mtime)
    for entry in kept[:-MOST_QUARANTINED]:
        if entry.name.endswith(".safetensors"):
            disk.remove(Path(entry.path))
