"""What `sessions.*`, the `session` parameter and `cache.inspect` do: names for stored prompts, and looking at the tree.

Lives on the event loop. What touches the disk runs on worker threads, one change of sessions after the other; what
touches a model's arrays is asked of its engine thread. A session holds what is on disk: bringing it into memory is what
any request with the same beginning does, so restoring one is no more than a request that uses it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from omlxd.cache.errors import CacheError
from omlxd.daemon.session_files import brought, checked, publish, size_of, tokens_of, write
from omlxd.engine.api import (
    CacheNode,
    Generation,
    GenerationResult,
    InvalidParams,
    OmlxError,
    Progress,
    ProgressSink,
    SessionEntry,
    SessionExists,
    SessionNotFound,
    StorageFailed,
    Unsupported,
)
from omlxd.engine.disk_cache import DiskCache
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.pool import Pool
from omlxd.engine.slot import EngineHandle

if TYPE_CHECKING:
    from omlxd.cache.keys import MediaSpan
    from omlxd.cache.sessions import Session
    from omlxd.cache.ssd import ModelStore, SsdStore
    from omlxd.cache.tree_view import Node
    from omlxd.engine.session_file import Content

MAX_NAME = 128
PREVIEW_TOKENS = 16

log = logging.getLogger(__name__)
T = TypeVar("T")


class Sessions:
    """The sessions as clients see them."""

    def __init__(self, disk: DiskCache, pool: Pool, guard: MemoryGuard) -> None:
        self._disk = disk
        self._pool = pool
        self._guard = guard
        self._one_by_one = asyncio.Lock()
        self._updates: set[asyncio.Task[None]] = set()

    # -- the methods --------------------------------------------------------------------------------------------------

    @staticmethod
    def check_name(name: str) -> None:
        """Raises InvalidParams for a name that could be taken for a path, or cannot be shown on one line."""
        if not 1 <= len(name) <= MAX_NAME:
            raise InvalidParams("name", f"has {len(name)} characters, at least 1 and at most {MAX_NAME} are allowed")
        if name in (".", "..") or not name.isprintable() or set(name) & {"/", "\\"}:
            raise InvalidParams("name", "is not a name: it may have no /, no \\ and no control characters")

    async def warmed(self, generation: Generation, progress: ProgressSink) -> GenerationResult:
        """What came of a prompt that has been computed and stored. Raises what the generation does."""
        try:
            async for event in generation:
                if isinstance(event, Progress):
                    progress(event)
            return await generation.result()
        finally:
            generation.cancel()  # of no effect once it has ended

    async def save_prompt(
        self, engine: EngineHandle, name: str, warmed: GenerationResult, *, may_replace: bool
    ) -> SessionEntry:
        """Names a prompt that has been stored. Raises SessionExists, StorageFailed."""
        return await self.save(engine, name, warmed.prompt_token_ids, _pictures_of(warmed), may_replace=may_replace)

    async def save(
        self,
        engine: EngineHandle,
        name: str,
        tokens: Sequence[int],
        pictures: Sequence[MediaSpan] = (),
        *,
        may_replace: bool,
        apart: bytes = b"",
    ) -> SessionEntry:
        view, model = self._view(engine), engine.facts.name

        def save() -> Session:
            return view.store.save_session(
                view.model, name, tokens, pictures, may_replace=may_replace, kept_apart=apart
            )

        return _entry(await self._change(save, model, name))

    async def list(self, model: str | None) -> Sequence[SessionEntry]:
        catalog_name = None if model is None else (await self._pool.entry(model)).name
        await self.settle()
        found = await self._run(lambda: self._store().list_sessions(catalog_name), model or "", "")
        return [_entry(session) for session in sorted(found, key=lambda session: (session.model, session.name))]

    async def delete(self, model: str, name: str) -> SessionEntry:
        self.check_name(name)
        catalog_name = (await self._pool.entry(model)).name
        return _entry(await self._change(lambda: self._store().delete_session(catalog_name, name), catalog_name, name))

    async def export(self, engine: EngineHandle, name: str, path: str) -> SessionEntry:
        self.check_name(name)
        target = checked(path)
        await self.settle()
        session = await self.use(engine, name)
        tokens = await asyncio.to_thread(tokens_of, session)
        with self._memory("exporting the session", 2 * session.nbytes):  # its blocks, and the caches made of them
            hit = await brought(engine, tokens, session.media)
            try:
                written = await self._run(lambda: write(target, hit, session), engine.facts.name, name)
            finally:
                hit.release()
        entry = _entry(session)
        return SessionEntry(entry.name, entry.model, entry.tokens, written, entry.created_at, entry.last_used)

    @asynccontextmanager
    async def imported(self, name: str, path: str) -> AsyncIterator[Content]:
        """An import's file, checked for form. Raises Unsupported, StorageFailed, MemoryExceeded."""
        self.check_name(name)
        source = checked(path)
        self._store_is_there()

        def read() -> Content:
            from omlxd.engine.session_file import BadSession, read

            try:
                return read(source, most_bytes)
            except BadSession as error:
                raise Unsupported("session file", str(error)) from error
            except OSError as error:
                raise StorageFailed(path, error.strerror or type(error).__name__) from error

        most_bytes = min(self._disk.max_session_bytes, await asyncio.to_thread(size_of, source))
        with self._memory("importing the session", 3 * most_bytes):  # its bytes, its arrays, and the blocks cut of them
            yield await asyncio.to_thread(read)

    async def take_in(self, engine: EngineHandle, name: str, content: Content) -> SessionEntry:
        """Publishes what a file has and names it. Raises Unsupported, SessionExists, StorageFailed."""
        view, model = self._view(engine), engine.facts.name
        there = await self._run(lambda: view.store.list_sessions(model), model, name)
        if any(session.name == name for session in there):
            raise SessionExists(model, name)
        apart = secrets.token_bytes(16)
        await engine.ask_cache(partial(publish, content, apart))
        return await self.save(engine, name, content.tokens, content.pictures, may_replace=False, apart=apart)

    # -- a request's session ------------------------------------------------------------------------------------------

    async def use(self, engine: EngineHandle, name: str) -> Session:
        """The session a request names. Raises SessionNotFound, Unsupported, StorageFailed."""
        self.check_name(name)
        await self.settle()
        view, model = self._view(engine), engine.facts.name
        return await self._run(lambda: view.store.use_session(model, name), model, name)

    def keep(self, engine: EngineHandle, session: Session, result: GenerationResult) -> None:
        """Moves a request's session on to the end of its answer, soon: whoever asks for sessions waits for it."""
        tokens, pictures = [*result.prompt_token_ids, *result.token_ids], _pictures_of(result)

        async def update() -> None:
            try:
                await self.save(engine, session.name, tokens, pictures, may_replace=True, apart=session.apart)
            except OmlxError as error:
                log.warning("session %r stays where it was: %s", session.name, error)

        task = asyncio.get_running_loop().create_task(update(), name=f"session-{session.name}")
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)

    async def settle(self) -> None:
        """Waits for the sessions that are being moved on."""
        if self._updates:
            await asyncio.wait(set(self._updates))

    async def close(self) -> None:
        await self.settle()

    # -- looking at the tree ------------------------------------------------------------------------------------------

    async def inspect(self, engine: EngineHandle, limit: int, session: str | None) -> Sequence[CacheNode]:
        """Raises SessionNotFound, Unsupported."""
        keys: frozenset[str] | None = None
        if session is not None:
            keys = frozenset(key.hex() for _, key in (await self.use(engine, session)).held)
        nodes: dict[tuple[bool, str], Node] = {}
        if engine.uncached is None:
            for node in await engine.ask_cache(lambda cache: cache.nodes(limit)):
                nodes[node.is_checkpoint, node.key] = node
        if engine.store is not None:
            view = engine.store
            for node in await asyncio.to_thread(view.store.nodes, view.model, limit):
                there = nodes.get((node.is_checkpoint, node.key))
                nodes[node.is_checkpoint, node.key] = node if there is None else there.also_on_disk(node)
        chosen = [node for node in nodes.values() if keys is None or node.key in keys]
        return [await _shown(engine, node) for node in sorted(chosen, key=lambda node: node.start)[:limit]]

    @contextmanager
    def _memory(self, what: str, nbytes: int) -> Iterator[None]:
        """Holds memory for work outside of an engine's. Raises MemoryExceeded."""
        self._guard.shrink_cache(nbytes)
        reservation = self._guard.reserve("sessions", "kv", nbytes)
        if reservation is None:
            advice = "send it again later, unload a model or raise memory.limit_bytes"
            raise self._guard.gave_up(what, nbytes, advice=advice)
        try:
            yield
        finally:
            reservation.release()

    # -- small things -------------------------------------------------------------------------------------------------

    def _view(self, engine: EngineHandle) -> ModelStore:
        if engine.store is None:
            raise Unsupported("a session", engine.uncached or "there is no cache on disk: cache.ssd.enabled is false")
        return engine.store

    def _store_is_there(self) -> None:
        if not self._disk.is_enabled:
            raise Unsupported("a session", "there is no cache on disk: cache.ssd.enabled is false")

    def _store(self) -> SsdStore:
        """On a worker thread: it may have to be opened."""
        store = self._disk.open()
        if store is None:
            raise Unsupported("a session", "there is no cache on disk: cache.ssd.enabled is false")
        return store

    async def _change(self, work: Callable[[], T], model: str, name: str) -> T:
        async with self._one_by_one:
            return await self._run(work, model, name)

    async def _run(self, work: Callable[[], T], model: str, name: str) -> T:
        return await asyncio.to_thread(_translated, work, self._disk, model, name)


def _translated(work: Callable[[], T], disk: DiskCache, model: str, name: str) -> T:
    """The cache's errors as the client's."""
    from omlxd.cache.sessions import NoSuchSession, SessionIsThere

    try:
        return work()
    except NoSuchSession:
        raise SessionNotFound(model, name) from None
    except SessionIsThere:
        raise SessionExists(model, name) from None
    except (CacheError, OSError, sqlite3.Error) as error:
        named = error.filename if isinstance(error, OSError) else None
        raise StorageFailed(str(named or disk.directory), str(error)) from error


def _pictures_of(result: GenerationResult) -> Sequence[MediaSpan]:
    from omlxd.cache.keys import MediaSpan

    return [MediaSpan(picture.start, picture.stop, picture.digest) for picture in result.prompt_pictures]


def _entry(session: Session) -> SessionEntry:
    return SessionEntry(
        session.name, session.model, session.num_tokens, session.nbytes, session.created_at, session.last_used
    )


async def _shown(engine: EngineHandle, node: Node) -> CacheNode:
    from omlxd.cache.keys import TOKEN_BYTES, unpack

    first = unpack(node.tokens[: PREVIEW_TOKENS * TOKEN_BYTES])
    return CacheNode(
        key=node.key,
        parent=node.parent,
        start=node.start,
        tokens=len(node.tokens) // TOKEN_BYTES,
        is_checkpoint=node.is_checkpoint,
        hot=node.hot,
        ssd=node.ssd,
        bytes=node.nbytes,
        last_used=node.last_used,
        pins=node.pins,
        text_preview=await engine.text(first),
    )
