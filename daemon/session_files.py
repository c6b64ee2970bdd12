"""A session's way into a file and back: through its model's prefix cache, as far as memory and disk have it.

For `daemon.sessions`. What touches the cache is asked of the model's engine thread; files are read and written on
worker threads. Nothing of mlx is imported before there is a model.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omlxd.cache.errors import CacheError
from omlxd.engine.api import InvalidParams, StorageFailed, Unsupported
from omlxd.engine.slot import EngineHandle

if TYPE_CHECKING:
    from omlxd.cache.keys import MediaSpan
    from omlxd.cache.prefix import Hit, PrefixCache
    from omlxd.cache.restoration import Restoration
    from omlxd.cache.sessions import Session
    from omlxd.cache.ssd_format import Record
    from omlxd.engine.session_file import Content

SUFFIX = ".safetensors"


async def brought(engine: EngineHandle, tokens: Sequence[int], media: Sequence[MediaSpan]) -> Hit:
    """Caches that hold these tokens, as far as memory and disk have them; whoever asks releases them."""
    asked = [*tokens, 0]
    restoration = await engine.ask_cache(lambda cache: cache.restoration(asked, media))
    try:
        await _read(engine, asked, media, restoration)
        return await engine.ask_cache(partial(_restored, tokens, media))
    finally:
        await asyncio.to_thread(restoration.release)


async def _read(
    engine: EngineHandle, tokens: Sequence[int], media: Sequence[MediaSpan], restoration: Restoration
) -> None:
    """Reads what the disk has of these tokens beyond what memory has."""
    view = engine.store
    if view is None:
        return
    standing = await engine.ask_cache(lambda cache: cache.standing(tokens, media))
    plan = await asyncio.wrap_future(view.plan(standing))
    for step in plan.steps:
        try:
            record = await asyncio.wrap_future(view.read(step))
        except CacheError:
            return  # its file has gone, or is bad: what came before it is what there is
        await engine.ask_cache(partial(_add, restoration, record))


def _add(restoration: Restoration, record: Record, _: PrefixCache) -> None:
    restoration.add(record, beyond_budget=True)


def _restored(tokens: Sequence[int], media: Sequence[MediaSpan], cache: PrefixCache) -> Hit:
    from omlxd.engine.session_file import restored

    return restored(tokens, media, cache)


def write(path: Path, hit: Hit, session: Session) -> int:
    """Writes the caches of a hit as the session's file; returns its bytes. Raises Unreadable, OSError."""
    from omlxd.cache.ssd_reader import Unreadable
    from omlxd.engine import session_file

    if hit.num_tokens < session.num_tokens:
        raise Unreadable(f"only {hit.num_tokens} of its {session.num_tokens} tokens could be brought into memory")
    return session_file.write(path, hit.caches, tokens_of(session), session.pictures)


def publish(content: Content, kept_apart: bytes, cache: PrefixCache) -> None:
    """Stores what a file has where only its session's requests find it. Raises Unsupported."""
    from omlxd.cache.keys import apart
    from omlxd.engine.session_file import BadSession, caches_of

    hit = cache.lookup(content.sample)
    try:
        caches = caches_of(content, hit.caches, cache.fresh())
    except BadSession as error:
        raise Unsupported("session file", str(error)) from error
    finally:
        hit.release()
    cache.checkpoint(content.tokens, caches, len(content.tokens), (*apart(kept_apart), *content.pictures))


def tokens_of(session: Session) -> Sequence[int]:
    """The token ids up to its position."""
    from omlxd.cache.keys import unpack

    return unpack(session.tokens)


def size_of(path: Path) -> int:
    """Raises StorageFailed."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise StorageFailed(str(path), error.strerror or type(error).__name__) from error


def checked(path: str) -> Path:
    """A client's path of a session's file. Raises InvalidParams."""
    if not os.path.isabs(path) or "\0" in path or not path.endswith(SUFFIX):
        raise InvalidParams("path", f"is not an absolute path that ends in {SUFFIX}")
    return Path(path)
