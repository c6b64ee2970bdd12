"""The pool: which models are loaded, and how they come and go.

Lives on the event loop and holds no lock: each model has a slot with a state machine of its own, so loading, draining
or unloading one never delays a request of another. `engine/loads.py` brings models in, `engine/departures.py` takes
them out. Imports no mlx: that happens on the loader thread, when a model is first wanted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from omlxd.engine.api import (
    Cancelled,
    LoadOptions,
    ModelBusy,
    ModelEntry,
    ModelMetrics,
    ModelNotFound,
    ProgressSink,
    RequestInfo,
    ShuttingDown,
    Unloaded,
    Unsupported,
)
from omlxd.engine.catalog import Catalog, CatalogEntry
from omlxd.engine.deadlines import Deadlines
from omlxd.engine.departures import Departures
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.load_bytes import fingerprint
from omlxd.engine.loading import check_options
from omlxd.engine.loads import Loads, ModelBackend
from omlxd.engine.metrics import joined
from omlxd.engine.slot import EngineHandle, OnState, Slot

log = logging.getLogger(__name__)


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
        deadlines: Deadlines | None = None,
    ) -> None:
        """`on_state` hears of every model's changes of state. Without a guard every model fits.

        `widens_halves`: half-precision weights are loaded as fp32, as on the CPU.
        """
        self._guard = guard or MemoryGuard()
        self._catalog = catalog
        self._on_state = on_state
        self._ended: dict[str, ModelMetrics] = {}  # of engines that have ended, by model
        self._backend = backend
        self._autoload = autoload
        self._ttl_s = ttl_s
        self._deadlines = deadlines or Deadlines()
        self._slots: dict[str, Slot] = {}
        self._aliases: dict[str, str] = {}  # what clients called a model that is in the pool, so no disk is read again
        self._departures = Departures(self._guard, self._deadlines, on_lost=self._engine_lost, on_absent=self._forget)
        self._loads = Loads(
            backend,
            self._guard,
            self._departures,
            self._deadlines,
            lambda: list(self._slots.values()),
            on_ready=self._departures.expire_after_rest,
            on_absent=self._forget,
            widens_halves=widens_halves,
        )
        self._closing = False

    def set_policy(self, *, autoload: bool, ttl_s: float) -> None:
        """Whether requests may load models, and the idle time of those that were given none of their own."""
        self._autoload = autoload
        for slot in self._slots.values():
            if slot.ttl_s == self._ttl_s:
                slot.ttl_s = ttl_s
                self._departures.expire_after_rest(slot)
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
            self._departures.expire_after_rest(slot)

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
        self._departures.expire_after_rest(slot)
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
        self._departures.expire_after_rest(slot)
        self._on_state(slot.show())
        return slot.show()

    def unload_idle(self) -> tuple[str, int] | None:
        """Has the least recently used idle model leave, unless it is pinned; its name and bytes, None without one."""
        slot = self._loads.room.idle()
        if slot is None or slot.engine is None:
            return None
        nbytes = 0 if slot.memory is None else slot.memory.nbytes
        log.info("unloading %s: its memory is needed", slot.entry.name)
        self._departures.tell_to_end(slot, slot.engine, "unloaded")
        return slot.entry.name, nbytes

    def running(self) -> Sequence[tuple[ModelEntry, EngineHandle]]:
        """The models that have an engine, and their engines."""
        return [(slot.show(), slot.engine) for slot in self._slots.values() if slot.engine is not None]

    def forget_returned(self) -> None:
        """Strikes out what a model left behind when it was unloaded and has let go of since."""
        self._departures.forget_returned()

    async def unload(self, name: str, *, now: bool) -> Unloaded:
        """Takes a model out: after its live requests have ended, or `now` by ending them.

        Raises ModelBusy when they have not ended in time; the model then stays.
        """
        entry = await self._entry(name)
        slot = self._slots.get(entry.name)
        if slot is not None and slot.state == "LOADING":
            self._loads[entry.name].give_up()
            self._loads[entry.name].fail(Cancelled(reason="model unloaded"))
            await self._changed(slot)
        if slot is None or slot.engine is None:
            self._slots.pop(entry.name, None)
            return Unloaded(absent(entry), 0)
        engine = slot.engine
        if not now:
            await self._departures.drain(slot)
        closed = await self._departures.take_out(slot, engine, "unloaded")
        return Unloaded(slot.show(), closed.freed_bytes)

    async def close(self) -> None:
        """Ends every engine with ShuttingDown for its live requests, and gives running loads up. Bounded in time."""
        self._closing = True
        self._loads.close()
        running = [(slot, slot.engine) for slot in self._slots.values() if slot.engine is not None]
        ends = [self._departures.take_out(slot, engine, "shutdown") for slot, engine in running]
        for end in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(end, BaseException):
                log.error("an engine did not end: %s", end)
        self._loads.end_thread()
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
                await self._changed(slot)
            elif slot is not None and slot.state == "LOADING":
                await self._loads[entry.name].wait(progress)
            elif autoload:
                entry.check()
                self._aliases[name] = entry.name
                slot = self._slots[entry.name] = Slot(entry, ttl_s=self._ttl_s, on_state=self._on_state)
                self._loads.begin(slot, options)
            else:
                hint = f"{name!r} is not loaded and may not be for this; load it with `omlxctl load {name}`"
                raise ModelNotFound(name, reason=hint)

    # -- going --------------------------------------------------------------------------------------------------------

    def _engine_lost(self, slot: Slot, engine: EngineHandle) -> None:
        self._ended[slot.entry.name] = self._with_past(slot.entry.name, engine.metrics)
        slot.pinned = False
        self._tell_pins()

    def _tell_pins(self) -> None:
        self._guard.pinned = frozenset(slot.entry.name for slot in self._slots.values() if slot.pinned)

    def _forget(self, slot: Slot) -> None:
        if self._slots.get(slot.entry.name) is slot:
            del self._slots[slot.entry.name]
        self._aliases = {alias: name for alias, name in self._aliases.items() if name != slot.entry.name}

    async def _changed(self, slot: Slot) -> None:
        """Waits for the slot's next change. Raises ModelBusy if none comes within the longest that one may take."""
        try:
            await asyncio.wait_for(slot.changed.wait(), self._deadlines.drain_s + self._deadlines.let_go_s)
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
