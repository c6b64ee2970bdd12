"""How models come into the pool: room is made, hooks are claimed, weights are read, and the engine begins.

Lives on the event loop; weights load on the loader thread, one model at a time. A load from which nothing has been
heard for too long is given up, as from a drive that does not answer: those who wait are told, the next load has a
thread of its own, and what the lost one holds stays in the ledger until it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from omlxd.engine.api import LoadOptions, ModelLoadFailed, OmlxError, ProgressSink, ShuttingDown
from omlxd.engine.catalog import CatalogEntry
from omlxd.engine.deadlines import Deadlines
from omlxd.engine.departures import Departures
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.hooks import Claim, Hook, HookRegistry
from omlxd.engine.inbox import Remains
from omlxd.engine.ledger import Reservation
from omlxd.engine.load_bytes import fingerprint, load_bytes
from omlxd.engine.loading import GivenUp, Loading, Stalled
from omlxd.engine.model import LoadedModel
from omlxd.engine.room import Room
from omlxd.engine.slot import EngineHandle, Slot

log = logging.getLogger(__name__)

LOAD_GROUP_BYTES = 64 * 2**20  # of weights, which stand twice in memory while they are cast


class ModelBackend(Protocol):
    """How models become engines. `hooks` and `load` run on the loader thread, the others on the event loop."""

    def hooks(self, entry: CatalogEntry, options: LoadOptions) -> Sequence[Hook]:
        """What the model needs changed about library classes while it is there; nothing for most."""
        ...

    def load(self, entry: CatalogEntry, options: LoadOptions, progress: ProgressSink) -> LoadedModel: ...

    def start(self, loaded: LoadedModel) -> EngineHandle: ...

    def close(self) -> None: ...


class Loads:
    """The loads under way, by model."""

    def __init__(
        self,
        backend: ModelBackend,
        guard: MemoryGuard,
        departures: Departures,
        deadlines: Deadlines,
        slots: Callable[[], Sequence[Slot]],
        *,
        on_ready: Callable[[Slot], None],
        on_absent: Callable[[Slot], None],
        widens_halves: bool,
    ) -> None:
        """`on_ready` is called when a slot has its engine, `on_absent` when its load was given up."""
        self._backend = backend
        self._departures = departures
        self._deadlines = deadlines
        self._on_ready = on_ready
        self._on_absent = on_absent
        self._widens_halves = widens_halves
        self._hooks = HookRegistry()
        self.room = Room(guard, slots, departures.leave_for_another)
        self._loads: dict[str, Loading] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loader = _loader()
        self._closing = False

    def __getitem__(self, name: str) -> Loading:
        return self._loads[name]

    def begin(self, slot: Slot, options: LoadOptions) -> None:
        slot.enter("LOADING")
        loading = self._loads[slot.entry.name] = slot.loading = Loading(self._deadlines.stalled_s)
        task = asyncio.get_running_loop().create_task(self._load(slot, loading, options))
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Gives up the loads that run; those who wait get ShuttingDown."""
        self._closing = True
        for loading in self._loads.values():
            loading.give_up()
            loading.fail(ShuttingDown())

    def end_thread(self) -> None:
        self._loader.shutdown(wait=False, cancel_futures=True)

    async def _load(self, slot: Slot, loading: Loading, options: LoadOptions) -> None:
        began = time.monotonic()
        try:
            slot.memory = await self._reserve(slot, loading)
            loaded, slot.claim = await loading.run(self._loader, lambda report: self._read(slot.entry, options, report))
            if self._closing:
                raise GivenUp
            slot.memory.turn_into("weights", loaded.facts.weight_bytes)
            slot.adapter = options.adapter
            slot.engine = self._backend.start(loaded)
            del loaded  # the engine owns the model now; a frame that kept it would outlive the unload
        except Stalled as stalled:
            self._loader.shutdown(wait=False)
            self._loader = _loader()
            stalled.work.add_done_callback(_drop)
            self._departures.leave_behind(slot, Remains("a load that does not answer", stalled.work.done))
            hint = "look whether the drive that holds its files answers, then load it again"
            reason = f"nothing was heard from the load for {self._deadlines.stalled_s:g} s"
            self._failed(slot, loading, ModelLoadFailed(slot.entry.name, reason, hint))
            return
        except Exception as exc:  # noqa: BLE001  whatever a load raises, those who wait must hear of it
            slot.give_memory_back()
            slot.release_hooks()
            self._failed(slot, loading, exc)
            return
        finally:
            del self._loads[slot.entry.name]
        self._departures.watch(slot)
        slot.loaded_at = time.time()
        slot.enter("READY")
        loading.succeed()
        log.info("loaded %s in %.1f s", slot.entry.name, time.monotonic() - began)
        self._on_ready(slot)

    async def _reserve(self, slot: Slot, loading: Loading) -> Reservation:
        """Reserves the weights, and the group of them that is being cast; others make room for it."""
        slot.files = await asyncio.to_thread(fingerprint, slot.entry.path)
        nbytes = await asyncio.to_thread(load_bytes, slot.entry, widens_halves=self._widens_halves)
        return await self.room.reserve(slot, nbytes + min(nbytes, LOAD_GROUP_BYTES), loading)

    def _read(self, entry: CatalogEntry, options: LoadOptions, report: ProgressSink) -> tuple[LoadedModel, Claim]:
        """On the loader thread: the hooks first, so that no other backend's is in the way of what is read."""
        claim = self._hooks.claim(self._backend.hooks(entry, options))
        try:
            return self._backend.load(entry, options, report), claim
        except BaseException:
            claim.release()
            raise

    def _failed(self, slot: Slot, loading: Loading, exc: Exception) -> None:
        name = slot.entry.name
        if isinstance(exc, GivenUp):
            log.info("gave up loading %s: nobody waits for it", name)
            slot.enter("ABSENT")
            self._on_absent(slot)
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


def _loader() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="loader")


def _drop(work: asyncio.Future[tuple[LoadedModel, Claim]]) -> None:
    """What a load that was given up has read after all goes; so do its hooks."""
    if not work.cancelled() and work.exception() is None:
        work.result()[1].release()
