"""The pool: which models are loaded, and how they come and go.

Lives on the event loop and holds no lock: each model has a slot with a state machine of its own, so loading, draining
or unloading one never delays a request of another. Weights load on the loader thread, one model at a time. Imports no
mlx: that happens on the loader thread, when a model is first wanted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol

from omlxd.engine.api import (
    Cancelled,
    EngineFailed,
    LoadOptions,
    ModelBusy,
    ModelEntry,
    ModelLoadFailed,
    ModelMetrics,
    ModelNotFound,
    OmlxError,
    ProgressSink,
    RequestInfo,
    ShuttingDown,
    Unloaded,
    Unsupported,
)
from omlxd.engine.catalog import Catalog, CatalogEntry
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.inbox import Close, Closed
from omlxd.engine.ledger import Reservation
from omlxd.engine.load_bytes import fingerprint, load_bytes
from omlxd.engine.loading import GivenUp, Loading, check_options
from omlxd.engine.metrics import joined
from omlxd.engine.model import LoadedModel
from omlxd.engine.room import Room
from omlxd.engine.slot import EngineHandle, OnState, Slot
from omlxd.engine.unreturned import Unreturned

log = logging.getLogger(__name__)

DRAIN_S = 600.0  # how long an unload waits for the model's live requests
LOAD_GROUP_BYTES = 64 * 2**20  # of weights, which stand twice in memory while they are cast
LET_GO_S = 30.0  # how long an engine may take to end once told to: a prefill turn and a step at most


class ModelBackend(Protocol):
    """How models become engines. `load` runs on the loader thread, the others on the event loop."""

    def load(self, entry: CatalogEntry, options: LoadOptions, progress: ProgressSink) -> LoadedModel: ...

    def start(self, loaded: LoadedModel) -> EngineHandle: ...

    def close(self) -> None: ...


class Pool:
    """The models of one daemon."""

    def __init__(
        self,
        catalog: Catalog,
        backend: ModelBackend,
        *,
        autoload: bool = True,
        ttl_s: float = 0,
        on_state: OnState = lambda entry: None,
        guard: MemoryGuard | None = None,
        widens_halves: bool = False,
    ) -> None:
        """`on_state` hears of every model's changes of state. Without a guard every model fits.

        `widens_halves`: half-precision weights are loaded as fp32, as on the CPU.
        """
        self._guard = guard or MemoryGuard()
        self._widens_halves = widens_halves
        self._room = Room(self._guard, lambda: list(self._slots.values()), self._leave_for_another)
        self._unreturned = Unreturned(self._guard.ledger)
        self._catalog = catalog
        self._on_state = on_state
        self._ended: dict[str, ModelMetrics] = {}  # of engines that have ended, by model
        self._backend = backend
        self._autoload = autoload
        self._ttl_s = ttl_s
        self._slots: dict[str, Slot] = {}
        self._aliases: dict[str, str] = {}  # what clients called a model that is in the pool, so no disk is read again
        self._loads: dict[str, Loading] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._closing = False

    def set_policy(self, *, autoload: bool, ttl_s: float) -> None:
        """Whether requests may load models, and the idle time of those that were given none of their own."""
        self._autoload = autoload
        for slot in self._slots.values():
            if slot.ttl_s == self._ttl_s:
                slot.ttl_s = ttl_s
                self._start_idle_clock(slot)
        self._ttl_s = ttl_s

    # -- reading ------------------------------------------------------------------------------------------------------

    async def entries(self) -> Sequence[ModelEntry]:
        """The whole catalog, loaded or not, broken ones with their reason, and loaded models that left the disk."""
        found = {entry.name: entry for entry in await asyncio.to_thread(self._catalog.scan)}
        await self._compare_with_disk()
        names = sorted(found.keys() | self._slots.keys())
        return [self._slots[name].show() if name in self._slots else absent(found[name]) for name in names]

    async def entry(self, name: str) -> ModelEntry:
        """One model of the catalog, loaded or not. Raises ModelNotFound."""
        found = await self._entry(name)
        slot = self._slots.get(found.name)
        return absent(found) if slot is None else slot.show()

    def loaded(self) -> Sequence[ModelEntry]:
        """What is in the pool now, without a look at the disk."""
        return [slot.show() for slot in self._slots.values()]

    async def _compare_with_disk(self) -> None:
        """Notices models whose files have changed or gone since they were loaded; they stay as they are."""
        for slot in [slot for slot in self._slots.values() if slot.engine is not None]:
            now = await asyncio.to_thread(fingerprint, slot.entry.path)
            slot.on_disk = "gone" if not now and slot.files else "same" if now == slot.files else "changed"

    def requests(self) -> Sequence[RequestInfo]:
        """The live requests of all engines."""
        return [info for slot in self._slots.values() if slot.engine for info in slot.engine.requests]

    def metrics(self) -> Mapping[str, ModelMetrics]:
        """What each model has done since the daemon started, under every engine that it had."""
        now = {slot.entry.name: slot.engine.metrics for slot in self._slots.values() if slot.engine}
        return self._ended | {name: self._with_past(name, metrics) for name, metrics in now.items()}

    def _with_past(self, name: str, metrics: ModelMetrics) -> ModelMetrics:
        past = self._ended.get(name)
        return metrics if past is None else joined(past, metrics)

    # -- using --------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, name: str, *, autoload: bool, progress: ProgressSink) -> AsyncIterator[EngineHandle]:
        """The engine of a model, loaded if need be; it stays while the lease is held, unless unloaded with `now`."""
        slot = await self._ready(name, LoadOptions(), autoload=autoload and self._autoload, progress=progress)
        engine = slot.running()
        slot.take()
        try:
            yield engine
        finally:
            slot.give_back()
            self._start_idle_clock(slot)

    async def load(self, name: str, options: LoadOptions, progress: ProgressSink) -> ModelEntry:
        """Loads a model, or waits for the load that runs; sets pin and TTL. Another adapter loads it anew."""
        check_options(options)  # a model that is there already would hide that they were not heeded
        slot = await self._ready(name, options, autoload=True, progress=progress)
        if options.adapter is not None and slot.adapter != options.adapter:
            await self.unload(slot.entry.name, now=False)
            slot = await self._ready(name, options, autoload=True, progress=progress)
        slot.pinned = slot.pinned or options.pin
        self._tell_pins()
        if options.ttl_s is not None:
            slot.ttl_s = options.ttl_s
        self._start_idle_clock(slot)
        return slot.show()

    async def pin(self, name: str, *, pinned: bool) -> ModelEntry:
        """Pins or unpins a loaded model. Raises Unsupported to pin one that is not there."""
        entry = await self._entry(name)
        slot = self._slots.get(entry.name)
        if slot is None or not (slot.usable or slot.state == "DRAINING"):
            if pinned:
                raise Unsupported(f"pinning {entry.name}", "it is not loaded; load it with pin")
            return absent(entry) if slot is None else slot.show()
        slot.pinned = pinned
        self._tell_pins()
        self._start_idle_clock(slot)
        self._on_state(slot.show())
        return slot.show()

    def unload_idle(self) -> tuple[str, int] | None:
        """Has the least recently used idle model leave, unless it is pinned; its name and bytes, None without one."""
        slot = self._room.idle()
        if slot is None or slot.engine is None:
            return None
        nbytes = 0 if slot.memory is None else slot.memory.nbytes
        log.info("unloading %s: its memory is needed", slot.entry.name)
        self._tell_to_end(slot, slot.engine, "unloaded")
        return slot.entry.name, nbytes

    def running(self) -> Sequence[tuple[ModelEntry, EngineHandle]]:
        """The models that have an engine, and their engines."""
        return [(slot.show(), slot.engine) for slot in self._slots.values() if slot.engine is not None]

    def forget_returned(self) -> None:
        """Strikes out what a model left behind when it was unloaded and has let go of since."""
        self._unreturned.look()

    async def unload(self, name: str, *, now: bool) -> Unloaded:
        """Takes a model out: after its live requests have ended, or `now` by ending them.

        Raises ModelBusy when they have not ended within DRAIN_S; the model then stays.
        """
        entry = await self._entry(name)
        slot = self._slots.get(entry.name)
        if slot is not None and slot.state == "LOADING":
            self._loads[entry.name].give_up()
            self._loads[entry.name].fail(Cancelled(reason="model unloaded"))
            await _changed(slot)
        if slot is None or slot.engine is None:
            self._slots.pop(entry.name, None)
            return Unloaded(absent(entry), 0)
        engine = slot.engine
        if not now:
            await self._drain(slot)
        closed = await self._take_out(slot, engine, "unloaded")
        return Unloaded(slot.show(), closed.freed_bytes)

    async def close(self) -> None:
        """Ends every engine with ShuttingDown for its live requests, and gives running loads up. Bounded in time."""
        self._closing = True
        for loading in self._loads.values():
            loading.give_up()
            loading.fail(ShuttingDown())
        running = [(slot, slot.engine) for slot in self._slots.values() if slot.engine is not None]
        ends = [self._take_out(slot, engine, "shutdown") for slot, engine in running]
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(end, BaseException):
                log.error("an engine did not end: %s", end)
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._backend.close()

    # -- coming -------------------------------------------------------------------------------------------------------

    async def _entry(self, name: str) -> CatalogEntry:
        known = self._slots.get(self._aliases.get(name, name))
        is_there = known is not None and known.state != "FAILED"  # its files may have been mended since
        return known.entry if known is not None and is_there else await asyncio.to_thread(self._catalog.resolve, name)

    async def _ready(self, name: str, options: LoadOptions, *, autoload: bool, progress: ProgressSink) -> Slot:
        """A usable slot for the name. Waits for whatever the model is just doing."""
        while True:
            if self._closing:
                raise ShuttingDown
            entry = await self._entry(name)
            slot = self._slots.get(entry.name)
            if slot is not None and slot.usable:
                self._aliases[name] = entry.name
                return slot
            if slot is not None and slot.state in ("DRAINING", "UNLOADING"):
                await _changed(slot)
            elif slot is not None and slot.state == "LOADING":
                await self._loads[entry.name].wait(progress)
            elif autoload:
                entry.check()
                self._aliases[name] = entry.name
                self._begin_load(entry, options)
            else:
                hint = f"{name!r} is not loaded and may not be for this; load it with `omlxctl load {name}`"
                raise ModelNotFound(name, reason=hint)

    def _begin_load(self, entry: CatalogEntry, options: LoadOptions) -> None:
        slot = self._slots[entry.name] = Slot(entry, ttl_s=self._ttl_s, on_state=self._on_state)
        slot.enter("LOADING")
        loading = self._loads[entry.name] = slot.loading = Loading()
        self._spawn(self._load(slot, loading, options))

    async def _load(self, slot: Slot, loading: Loading, options: LoadOptions) -> None:
        began = time.monotonic()
        try:
            slot.memory = await self._reserve(slot, loading)
            loaded = await loading.run(self._loader, self._backend.load, slot.entry, options)
            if self._closing:
                raise GivenUp
            slot.memory.turn_into("weights", loaded.facts.weight_bytes)
            slot.adapter = options.adapter
            slot.engine = self._backend.start(loaded)
            del loaded  # the engine owns the model now; a frame that kept it would outlive the unload
        except Exception as exc:  # noqa: BLE001  whatever a load raises, those who wait must hear of it
            slot.give_memory_back()
            self._load_failed(slot, loading, exc)
            return
        finally:
            del self._loads[slot.entry.name]
        slot.engine.closed.add_done_callback(lambda closed: self._engine_ended(slot, closed.result()))
        slot.loaded_at = time.time()
        slot.enter("READY")
        loading.succeed()
        log.info("loaded %s in %.1f s", slot.entry.name, time.monotonic() - began)
        self._start_idle_clock(slot)

    async def _reserve(self, slot: Slot, loading: Loading) -> Reservation:
        """Reserves the weights, and the group of them that is being cast; others make room for it."""
        path = slot.entry.path
        slot.files = await asyncio.to_thread(fingerprint, path)
        nbytes = await asyncio.to_thread(load_bytes, slot.entry, widens_halves=self._widens_halves)
        return await self._room.reserve(slot, nbytes + min(nbytes, LOAD_GROUP_BYTES), loading)

    async def _leave_for_another(self, slot: Slot) -> None:
        """Takes a model out for one that waits for room: it finishes what it has and begins nothing new."""
        log.info("unloading %s: another model needs its memory", slot.entry.name)
        await self._drain(slot)
        if slot.engine is not None:
            await self._take_out(slot, slot.engine, "unloaded")

    def _load_failed(self, slot: Slot, loading: Loading, exc: Exception) -> None:
        name = slot.entry.name
        if isinstance(exc, GivenUp):
            log.info("gave up loading %s: nobody waits for it", name)
            slot.enter("ABSENT")
            self._forget(slot)
            loading.succeed()  # whoever came meanwhile finds no slot and begins anew
            return
        if isinstance(exc, OmlxError):
            error = exc
            log.warning("%s", exc)
        else:
            error = ModelLoadFailed(name, type(exc).__name__, "the daemon's log has the details")
            log.error("loading %s failed", name, exc_info=exc)
        slot.enter("FAILED", str(error))
        loading.fail(error)

    # -- going --------------------------------------------------------------------------------------------------------

    async def _drain(self, slot: Slot) -> None:
        """Waits for the live requests. New ones wait for the end of this and then load the model anew."""
        if slot.usable:
            slot.enter("DRAINING")
        try:
            async with asyncio.timeout(DRAIN_S):
                while slot.leases and slot.state == "DRAINING":
                    await slot.changed.wait()
        except TimeoutError:
            raise ModelBusy(slot.entry.name, slot.leases) from None
        finally:
            if slot.leases and slot.state == "DRAINING":  # the deadline passed, or the caller left
                slot.enter("BUSY")

    async def _take_out(self, slot: Slot, engine: EngineHandle, why: Literal["unloaded", "shutdown"]) -> Closed:
        self._tell_to_end(slot, engine, why)
        try:
            return await asyncio.wait_for(asyncio.shield(engine.closed), LET_GO_S)
        except TimeoutError:
            raise EngineFailed(slot.entry.name, f"it did not end within {LET_GO_S:g} s") from None

    def _tell_to_end(self, slot: Slot, engine: EngineHandle, why: Literal["unloaded", "shutdown"]) -> None:
        if slot.usable or slot.state == "DRAINING":
            slot.enter("UNLOADING")
            engine.close(Close(why))

    def _engine_ended(self, slot: Slot, closed: Closed) -> None:
        if slot.engine is not None:
            self._ended[slot.entry.name] = self._with_past(slot.entry.name, slot.engine.metrics)
        slot.engine = None
        slot.loaded_at = None
        self._account_for(slot, closed)
        if closed.failure is None:
            slot.enter("ABSENT")
            self._forget(slot)
            log.info("unloaded %s; %d bytes came free", slot.entry.name, closed.freed_bytes)
        else:
            slot.enter("FAILED", closed.failure)
            log.error("the engine of %s ended: %s", slot.entry.name, closed.failure)

    def _account_for(self, slot: Slot, closed: Closed) -> None:
        nbytes = 0 if slot.memory is None else slot.memory.nbytes
        slot.give_memory_back()
        slot.pinned = False
        self._tell_pins()
        if closed.remains is not None:
            log.error("%s was unloaded and is still held by %s", slot.entry.name, closed.remains.holder)
            self._unreturned.note(slot.entry.name, nbytes, closed.remains)
        else:
            self._guard.freed(nbytes)

    def _tell_pins(self) -> None:
        self._guard.pinned = frozenset(slot.entry.name for slot in self._slots.values() if slot.pinned)

    def _forget(self, slot: Slot) -> None:
        if self._slots.get(slot.entry.name) is slot:
            del self._slots[slot.entry.name]
        self._aliases = {alias: name for alias, name in self._aliases.items() if name != slot.entry.name}

    def _start_idle_clock(self, slot: Slot) -> None:
        """An unpinned model that nobody uses goes when its TTL has passed without a request."""
        if slot.state == "READY" and slot.ttl_s > 0 and not slot.pinned:
            asyncio.get_running_loop().call_later(slot.ttl_s, self._expire, slot, slot.ttl_s, slot.last_used)

    def _expire(self, slot: Slot, ttl_s: float, last_used: float | None) -> None:
        is_due = slot.ttl_s == ttl_s and slot.last_used == last_used
        if slot.state == "READY" and is_due and not slot.pinned and slot.engine is not None:
            log.info("unloading %s: not used for %g s", slot.entry.name, slot.ttl_s)
            self._spawn(self._take_out(slot, slot.engine, "unloaded"))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)


async def _changed(slot: Slot) -> None:
    """Waits for the slot's next change. Raises ModelBusy if none comes within the longest that one may take."""
    try:
        await asyncio.wait_for(slot.changed.wait(), DRAIN_S + LET_GO_S)
    except TimeoutError:
        raise ModelBusy(slot.entry.name, slot.leases) from None


def absent(entry: CatalogEntry) -> ModelEntry:
    """A model that is not in the pool, as `models.list` shows it."""
    return ModelEntry(
        name=entry.name,
        path=str(entry.path),
        kind=entry.kind,
        state="ABSENT" if entry.error is None else "FAILED",
        size_bytes=entry.size_bytes,
        error=entry.error,
    )
