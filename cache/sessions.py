"""Sessions: names for positions in a model's stored prefixes, which hold what leads there on disk.

A session is one small file beside the blocks: the tokens up to its position and the keys that bring it back. Writing
it, whole or not at all, is the one moment at which a save happens; what it holds is derived from the files whenever the
directory is opened. `Sessions` runs everything on the tier's writer thread and waits for it: call it on a thread that
may wait. All methods raise CacheError (Unavailable while the disk is not there), OSError and sqlite3.Error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from omlxd.cache.disk import Disk
from omlxd.cache.errors import CacheError
from omlxd.cache.keys import MediaSpan, apart
from omlxd.cache.ssd_volume import SESSIONS, Volume
from omlxd.cache.store import Name

SCHEMA = 1
MAX_FILE_BYTES = 64 << 20


class NoSuchSession(CacheError):
    """The model has no session of that name."""


class SessionIsThere(CacheError):
    """The model has a session of that name already."""


class TooManySessions(CacheError):
    """The count or the bytes of all sessions would be over their limit; the message has both numbers."""


@dataclass(frozen=True, slots=True)
class Session:
    """`tokens` are packed ids up to the position; `held` the records that lead there, `nbytes` their files' size.

    `pictures` are those of the tokens. What was imported has an `apart` of its own: nobody but who names the session
    is answered from it, for nobody here has computed it.
    """

    model: str
    name: str
    identity: bytes
    tokens: bytes
    held: tuple[Name, ...]
    nbytes: int
    created_at: float
    last_used: float
    pictures: tuple[MediaSpan, ...] = ()
    apart: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        """What its keys are made of besides its tokens."""
        return (*apart(self.apart), *self.pictures)


@dataclass(frozen=True, slots=True)
class Chain:
    """What is on disk of some tokens: the first `tokens` of them, packed, and the records that bring them back."""

    tokens: bytes
    held: tuple[Name, ...]
    nbytes: int
    pictures: tuple[MediaSpan, ...] = ()
    apart: bytes = b""


@dataclass(frozen=True, slots=True)
class Quota:
    """How many sessions there may be, of all models, and how many bytes they may hold together."""

    max_count: int
    max_bytes: int


class Sessions:
    """The sessions of one directory. Lives on its writer thread."""

    def __init__(self, disk: Disk, quota: Quota, clock: Callable[[], float]) -> None:
        self.quota = quota  # swapped as a whole; what is over it stays
        self._disk = disk
        self._clock = clock
        self._by_name: dict[tuple[str, str], Session] = {}

    def opened(self, volume: Volume) -> None:
        """Reads all sessions and holds again what they hold. A file that is none is left alone."""
        self._by_name.clear()
        folder = volume.place.directory / SESSIONS
        volume.index.begin()
        volume.index.unpin_all()
        for entry in list(self._disk.list(folder)) if folder.is_dir() else []:
            session = _read(self._disk, Path(entry.path))
            if session is not None:
                self._by_name[session.model, session.name] = session
                volume.index.pin([key for _, key in session.held], 1)
        volume.index.commit()

    def all(self, model: str | None) -> list[Session]:
        return [session for session in self._by_name.values() if model in (None, session.model)]

    def get(self, model: str, name: str) -> Session:
        try:
            return self._by_name[model, name]
        except KeyError:
            raise NoSuchSession(name) from None

    def save(
        self, volume: Volume, model: str, name: str, identity: bytes, chain: Chain, *, may_replace: bool
    ) -> Session:
        there = self._by_name.get((model, name))
        if there is not None and not may_replace:
            raise SessionIsThere(name)
        self._check_quota(there, chain)
        now = self._clock()
        created = there.created_at if there is not None else now
        session = Session(
            model, name, identity, chain.tokens, chain.held, chain.nbytes, created, now, chain.pictures, chain.apart
        )
        self._write(volume, session)
        volume.index.begin()
        volume.index.pin([key for _, key in session.held], 1)
        if there is not None:
            volume.index.pin([key for _, key in there.held], -1)
        volume.index.commit()
        self._by_name[model, name] = session
        return session

    def use(self, volume: Volume, model: str, name: str) -> Session:
        """The session, used now."""
        session = replace(self.get(model, name), last_used=self._clock())
        self._by_name[model, name] = session
        volume.index.use([key for _, key in session.held], session.last_used)
        return session

    def delete(self, volume: Volume, model: str, name: str) -> Session:
        session = self.get(model, name)
        self._disk.remove(_path(volume, model, name))
        del self._by_name[model, name]
        volume.index.begin()
        volume.index.pin([key for _, key in session.held], -1)
        volume.index.commit()
        return session

    def _check_quota(self, there: Session | None, chain: Chain) -> None:
        others = [session for session in self._by_name.values() if session is not there]
        if len(others) >= self.quota.max_count:
            raise TooManySessions(
                f"there are {len(others)} sessions, sessions.max_count allows {self.quota.max_count}; delete some"
            )
        held = sum(session.nbytes for session in others)
        if held + chain.nbytes > self.quota.max_bytes:
            raise TooManySessions(
                f"it holds {chain.nbytes} bytes and the others {held}, sessions.max_bytes allows"
                f" {self.quota.max_bytes}; delete some"
            )

    def _write(self, volume: Volume, session: Session) -> None:
        path = _path(volume, session.model, session.name)
        self._disk.make_directory(path.parent)
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)  # left by a crash
        self._disk.write(part, [_said(session)], durable=True)
        self._disk.rename(part, path)


def _path(volume: Volume, model: str, name: str) -> Path:
    """A name is never part of a path: its digest is."""
    digest = blake2b(json.dumps([model, name]).encode(), digest_size=16).hexdigest()
    return volume.place.directory / SESSIONS / f"{digest}.json"


def _said(session: Session) -> bytes:
    return json.dumps(
        {
            "schema": SCHEMA,
            "model": session.model,
            "name": session.name,
            "identity": session.identity.hex(),
            "tokens": session.tokens.hex(),
            "held": [[kind, key.hex()] for kind, key in session.held],
            "bytes": session.nbytes,
            "created_at": session.created_at,
            "last_used": session.last_used,
            "pictures": [[span.start, span.stop, span.digest.hex()] for span in session.pictures],
            "apart": session.apart.hex(),
        }
    ).encode()


def _read(disk: Disk, path: Path) -> Session | None:
    if path.suffix != ".json" or path.stat().st_size > MAX_FILE_BYTES:
        return None
    try:
        said: dict[str, Any] = json.loads(disk.read(path))
        held: Sequence[Any] = said["held"]
        return Session(
            model=str(said["model"]),
            name=str(said["name"]),
            identity=bytes.fromhex(said["identity"]),
            tokens=bytes.fromhex(said["tokens"]),
            held=tuple((int(kind), bytes.fromhex(key)) for kind, key in held),
            nbytes=int(said["bytes"]),
            created_at=float(said["created_at"]),
            last_used=float(said["last_used"]),
            pictures=tuple(MediaSpan(int(a), int(b), bytes.fromhex(c)) for a, b, c in said.get("pictures", ())),
            apart=bytes.fromhex(said.get("apart", "")),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
