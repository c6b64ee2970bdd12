"""The SSD tier's index: which files there are, what they continue, how large they are and when they were last used.

A sqlite database beside the files, so that a start reads none of them. It is a convenience, never the truth: a file is
verified when it is read, and an index that is lost or broken is made again from the files. `Index` writes and belongs
to the writer thread; `Lookup` reads, through a connection of its own, on any one thread at a time. Both raise
sqlite3.Error.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omlxd.cache.keys import BlockSpec
from omlxd.cache.store import BLOCK, CHECKPOINT

VERSION = 1
ALIEN = 2  # besides blocks and checkpoints: an alien is a file of ours that this version cannot read
NEIGHBOURS = 4
BUSY_S = 5.0

_SCHEMA = """
CREATE TABLE models (id INTEGER PRIMARY KEY, identity TEXT NOT NULL UNIQUE, name TEXT NOT NULL DEFAULT '');
CREATE TABLE entries (
    id INTEGER PRIMARY KEY, model INTEGER NOT NULL, kind INTEGER NOT NULL, key BLOB NOT NULL, parent BLOB NOT NULL,
    start INTEGER NOT NULL, tokens BLOB NOT NULL, pictures INTEGER NOT NULL, gaps INTEGER NOT NULL,
    bytes INTEGER NOT NULL, used REAL NOT NULL, children INTEGER NOT NULL, pins INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX by_key ON entries (key, kind, model);
CREATE INDEX by_parent ON entries (parent, kind, tokens);
CREATE INDEX by_size ON entries (model, kind, bytes);
CREATE INDEX oldest ON entries (used, start DESC) WHERE children = 0 AND pins = 0;
"""
_COLUMNS = "entries.id, identity, kind, key, parent, start, tokens, gaps, bytes"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file: `identity` is its directory's name, `gaps` the rows that its window leaves lack."""

    id: int
    identity: str
    kind: int
    key: bytes
    parent: bytes
    start: int
    tokens: bytes
    gaps: int
    nbytes: int

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Totals:
    """What one model has on disk."""

    blocks: int = 0
    checkpoints: int = 0
    nbytes: int = 0


class Index:
    """The writing side."""

    def __init__(self, path: Path) -> None:
        """Opens or makes it. Raises sqlite3.Error for a file that is no index of this version."""
        self._held: Counter[bytes] = Counter()  # by key; whoever opens the index says what is held
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA page_size = 8192")  # the tokens of a block of 256 spill over in smaller ones
            self._db.execute("PRAGMA journal_mode = WAL")
            # A power cut may cost the last entries, whose files the next start finds again; it cannot break the file.
            self._db.execute("PRAGMA synchronous = NORMAL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            elif version != VERSION:
                raise sqlite3.DatabaseError(f"an index of version {version}, this one writes {VERSION}")
            self.used_bytes = int(self._db.execute("SELECT coalesce(sum(bytes), 0) FROM entries").fetchone()[0])
        except sqlite3.Error:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def begin(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        if self._db.in_transaction:
            self._db.execute("COMMIT")

    def find(self, identity: str, kind: int, key: bytes) -> Entry | None:
        return _one(self._db, identity, kind, key)

    def add(self, entry: Entry, *, used: float, pictures: bool = False) -> None:
        """Adds an entry whose `id` is not looked at, or takes the place of the one of its key."""
        there = self.find(entry.identity, entry.kind, entry.key)
        if there is not None:
            self.remove(there)
        model = self._model(entry.identity)
        (children,) = self._db.execute("SELECT count(*) FROM entries WHERE parent = ?", (entry.key,)).fetchone()
        children = children if entry.kind == BLOCK else 0
        row = (model, entry.kind, entry.key, entry.parent, entry.start, entry.tokens, pictures, entry.gaps)
        self._db.execute(
            "INSERT INTO entries (model, kind, key, parent, start, tokens, pictures, gaps, bytes, used, children, pins)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*row, entry.nbytes, used, children, self._held[entry.key]),
        )
        self._count_child(entry.parent, 1)
        self.used_bytes += entry.nbytes

    def remove(self, entry: Entry) -> None:
        if self._db.execute("DELETE FROM entries WHERE id = ?", (entry.id,)).rowcount:
            self._count_child(entry.parent, -1)
            self.used_bytes -= entry.nbytes

    def _count_child(self, parent: bytes, change: int) -> None:
        self._db.execute(
            f"UPDATE entries SET children = children + ? WHERE key = ? AND kind = {BLOCK}", (change, parent)
        )

    def use(self, keys: Iterable[bytes], used: float) -> None:
        """Blocks, and the checkpoints that have the same keys, were used."""
        self._db.executemany("UPDATE entries SET used = ? WHERE key = ? AND used < ?", ((used, k, used) for k in keys))

    def pin(self, keys: Sequence[bytes], change: int) -> None:
        """Holds what has these keys once more (1) or once less (-1), also what is added later."""
        for key in keys:
            self._held[key] += change
        self._db.executemany("UPDATE entries SET pins = ? WHERE key = ?", ((self._held[key], key) for key in keys))

    def unpin_all(self) -> None:
        self._held.clear()
        self._db.execute("UPDATE entries SET pins = 0 WHERE pins")

    def oldest(self) -> Entry | None:
        """The entry that goes first: not pinned, nothing continues it, and of such the one used longest ago."""
        return _first(
            self._db.execute(
                f"SELECT {_COLUMNS} FROM entries INDEXED BY oldest JOIN models ON models.id = model"
                " WHERE children = 0 AND pins = 0 ORDER BY used, start DESC LIMIT 1"
            )
        )

    def superseded(self, block: Entry) -> list[Entry]:
        """Shorter blocks that this one has all of: after the same parent, with its first tokens; nothing holds them."""
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM entries JOIN models ON models.id = model WHERE parent = ? AND kind = {BLOCK}"
            " AND tokens < ? AND identity = ? AND pictures = 0 AND pins = 0 AND children = 0"
            " ORDER BY tokens DESC LIMIT ?",
            (block.parent, block.tokens, block.identity, NEIGHBOURS),
        )
        return [entry for entry in (Entry(*row) for row in rows) if block.tokens.startswith(entry.tokens)]

    def keys(self, identity: str) -> set[tuple[int, bytes]]:
        """Every entry of one model, as (kind, key)."""
        return set(
            self._db.execute(
                "SELECT kind, key FROM entries JOIN models ON models.id = model WHERE identity = ?", (identity,)
            )
        )

    def name(self, identity: str, name: str) -> None:
        """What people call the model."""
        self._db.execute("UPDATE models SET name = ? WHERE id = ?", (name, self._model(identity)))

    def identities(self, name: str | None = None) -> list[str]:
        """Of all models, or of those of that name: one for each of its configurations."""
        rows = self._db.execute("SELECT identity FROM models WHERE ? IS NULL OR name = ?", (name, name))
        return [identity for (identity,) in rows]

    def unpinned(self, identity: str) -> list[Entry]:
        """Every entry of one model that nothing holds."""
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM entries JOIN models ON models.id = model WHERE identity = ? AND pins = 0",
            (identity,),
        )
        return [Entry(*row) for row in rows]

    def _model(self, identity: str) -> int:
        self._db.execute("INSERT OR IGNORE INTO models (identity) VALUES (?)", (identity,))
        return int(self._db.execute("SELECT id FROM models WHERE identity = ?", (identity,)).fetchone()[0])


class Lookup:
    """The reading side: what continues what. Sees what the writer has committed."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(
            f"{path.as_uri()}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )

    def close(self) -> None:
        self._db.close()

    def block(self, identity: str, key: bytes) -> Entry | None:
        return _one(self._db, identity, BLOCK, key)

    def checkpoint(self, identity: str, keys: Sequence[bytes]) -> Entry | None:
        """The checkpoint under one of these keys that stands furthest."""
        marks = ", ".join("?" * len(keys))
        return _first(
            self._db.execute(
                f"SELECT {_COLUMNS} FROM entries JOIN models ON models.id = model"
                f" WHERE key IN ({marks}) AND kind = {CHECKPOINT} AND identity = ?"
                " ORDER BY length(tokens) DESC LIMIT 1",
                (*keys, identity),
            )
        )

    def alike(self, identity: str, parent: bytes, tokens: bytes) -> list[Entry]:
        """Blocks after `parent` whose tokens stand next to these in order, and so share the most first ones."""
        query = (
            f"SELECT {_COLUMNS} FROM entries JOIN models ON models.id = model"
            f" WHERE parent = ? AND kind = {BLOCK} AND tokens {{}} ? AND identity = ? ORDER BY tokens {{}} LIMIT ?"
        )
        found: list[Entry] = []
        for side, order in ((">=", "ASC"), ("<", "DESC")):
            rows = self._db.execute(query.format(side, order), (parent, tokens, identity, NEIGHBOURS))
            found += [Entry(*row) for row in rows]
        return found

    def totals(self) -> dict[str, Totals]:
        """By the models' names; "" has those whose name is not known any more, until they are loaded."""
        rows = self._db.execute(
            "SELECT name, sum(kind = 0), sum(kind = 1), sum(bytes) FROM entries JOIN models ON models.id = model"
            " GROUP BY name"
        )
        return {name: Totals(blocks, checkpoints, nbytes) for name, blocks, checkpoints, nbytes in rows}

    def identities(self, name: str | None = None) -> list[str]:
        rows = self._db.execute("SELECT identity FROM models WHERE ? IS NULL OR name = ?", (name, name))
        return [identity for (identity,) in rows]

    def tree(self, identity: str, limit: int) -> list[tuple[Entry, float, int]]:
        """Entries with their last use and pins, parents before children, most recently used first."""
        rows = self._db.execute(
            f"SELECT {_COLUMNS}, used, pins FROM entries JOIN models ON models.id = model"
            f" WHERE identity = ? AND kind != {ALIEN} ORDER BY used DESC, start LIMIT ?",
            (identity, limit),
        )
        return [(Entry(*row[:-2]), row[-2], row[-1]) for row in rows]

    def page(self, identity: str, after: int, limit: int) -> list[Entry]:
        """Entries with a higher id, in order of their ids."""
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM entries JOIN models ON models.id = model"
            f" WHERE entries.id > ? AND identity = ? AND kind != {ALIEN} ORDER BY entries.id LIMIT ?",
            (after, identity, limit),
        )
        return [Entry(*row) for row in rows]


def entry_of(spec: BlockSpec, parent: bytes, *, identity: str, is_checkpoint: bool, gaps: int, nbytes: int) -> Entry:
    """A new entry, which has no id yet."""
    kind = CHECKPOINT if is_checkpoint else BLOCK
    return Entry(0, identity, kind, spec.key, parent, spec.start, spec.tokens, gaps, nbytes)


def _one(db: sqlite3.Connection, identity: str, kind: int, key: bytes) -> Entry | None:
    return _first(
        db.execute(
            f"SELECT {_COLUMNS} FROM entries JOIN models ON models.id = model"
            " WHERE key = ? AND kind = ? AND identity = ?",
            (key, kind, identity),
        )
    )


def _first(rows: sqlite3.Cursor) -> Entry | None:
    row = rows.fetchone()
    return None if row is None else Entry(*row)
