"""One model's place in the pool: its state, its engine, and who uses it.

Lives on the event loop; the pool drives it. The moves between states stand in one table, as for requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from omlxd.engine.api import GenerateRequest, InvariantError, ModelEntry, ModelMetrics, ModelState, Prompt, RequestInfo
from omlxd.engine.catalog import CatalogEntry
from omlxd.engine.hooks import Claim
from omlxd.engine.inbox import Close, Closed, Preempt, Refuse
from omlxd.engine.job import Job
from omlxd.engine.ledger import Reservation
from omlxd.engine.loading import Loading
from omlxd.engine.model import ModelFacts
from omlxd.engine.stream import EventStream

if TYPE_CHECKING:
    from omlxd.cache.prefix import PrefixCache
    from omlxd.cache.ssd import ModelStore
    from omlxd.engine.preparing import Prepared
    from omlxd.engine.vision_inputs import PictureInput

T = TypeVar("T")
OnState = Callable[[ModelEntry], None]

_NEXT: dict[ModelState, frozenset[ModelState]] = {
    "ABSENT": frozenset({"LOADING"}),
    "LOADING": frozenset({"READY", "FAILED", "ABSENT"}),
    "READY": frozenset({"BUSY", "DRAINING", "UNLOADING", "FAILED"}),
    "BUSY": frozenset({"READY", "DRAINING", "UNLOADING", "FAILED"}),
    "DRAINING": frozenset({"READY", "BUSY", "UNLOADING", "FAILED"}),
    "UNLOADING": frozenset({"ABSENT", "FAILED"}),
    "FAILED": frozenset(),  # the next load starts with a slot of its own
}


class EngineHandle(Protocol):
    """What the pool and the service need of an engine; `engine.engine.Engine` is it."""

    facts: ModelFacts
    store: ModelStore | None
    merges_rows: bool
    closed: asyncio.Future[Closed]

    @property
    def requests(self) -> Sequence[RequestInfo]: ...

    @property
    def metrics(self) -> ModelMetrics: ...

    @property
    def uncached(self) -> str | None: ...

    async def token_ids(self, prompt: Prompt) -> Sequence[int]: ...

    async def boundaries(self, prompt: Prompt, ids: Sequence[int]) -> Sequence[int]: ...

    async def prepare(self, request: GenerateRequest) -> Prepared: ...

    def holding(self, pictures: Sequence[PictureInput]) -> AbstractContextManager[None]: ...

    async def text(self, token_ids: Sequence[int]) -> str: ...

    async def ask_cache(self, question: Callable[[PrefixCache], T]) -> T: ...

    def submit(self, job: Job, stream: EventStream) -> None: ...

    def abort(self, id: str, reason: str | None) -> None: ...

    def relieve(self, command: Preempt | Refuse) -> None: ...

    def close(self, command: Close) -> None: ...


class Slot:
    """A model that is loaded, on its way in or out, or that failed to load."""

    def __init__(self, entry: CatalogEntry, *, ttl_s: float, on_state: OnState) -> None:
        """`on_state` is called after every change of state."""
        self.entry = entry
        self._on_state = on_state
        self.state: ModelState = "ABSENT"
        self.error: str | None = None
        self.pinned = False
        self.ttl_s = ttl_s
        self.adapter: str | None = None
        self.engine: EngineHandle | None = None
        self.loading: Loading | None = None
        self.memory: Reservation | None = None  # its weights, from before they are loaded
        self.claim: Claim | None = None  # its hooks on library classes
        self.files: Sequence[tuple[str, int, int]] = ()  # as they were when it was loaded
        self.on_disk: Literal["same", "changed", "gone"] = "same"
        self.leases = 0
        self.loaded_at: float | None = None
        self.last_used: float | None = None
        self.changed = asyncio.Event()  # set, and replaced, at every change of state or of the number of leases

    def enter(self, state: ModelState, error: str | None = None) -> None:
        """Moves on. Raises InvariantError for a move that the table does not allow."""
        if state not in _NEXT[self.state]:
            raise InvariantError(f"model {self.entry.name}: {self.state} -> {state}")
        self.state = state
        self.error = error
        self._tell()
        self._on_state(self.show())

    @property
    def usable(self) -> bool:
        return self.state in ("READY", "BUSY")

    @property
    def is_idle(self) -> bool:
        """Nobody uses the model, and nobody who waited for it is just about to."""
        return self.state == "READY" and not (self.loading is not None and self.loading.is_awaited)

    def give_memory_back(self) -> int:
        """Releases what is reserved for the weights; returns its bytes."""
        memory, self.memory = self.memory, None
        if memory is None:
            return 0
        memory.release()
        return memory.nbytes

    def release_hooks(self) -> None:
        if self.claim is not None:
            self.claim.release()

    def running(self) -> EngineHandle:
        """The engine of a usable slot."""
        if self.engine is None:
            raise InvariantError(f"model {self.entry.name} is {self.state} and has no engine")
        return self.engine

    def take(self) -> None:
        """One more request uses the model."""
        self.leases += 1
        self.last_used = time.time()
        if self.state == "READY":
            self.enter("BUSY")

    def give_back(self) -> None:
        self.leases -= 1
        self.last_used = time.time()
        if self.state == "BUSY" and not self.leases:
            self.enter("READY")
        self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def show(self) -> ModelEntry:
        """The slot as `models.list` shows it."""
        return ModelEntry(
            name=self.entry.name,
            path=str(self.entry.path),
            kind=self.entry.kind,
            state=self.state,
            size_bytes=self.entry.size_bytes,
            pinned=self.pinned,
            ttl_s=self.ttl_s or None,
            loaded_at=self.loaded_at,
            last_used=self.last_used,
            requests=self.leases,
            error=self.error,
            note=self._note(),
        )

    def _note(self) -> str | None:
        """What a client should know of how the model runs."""
        if self.engine is None:
            return None
        notes = []
        if self.on_disk == "changed":
            notes.append("its files have changed since it was loaded; unload it to use the new ones")
        if self.on_disk == "gone":
            notes.append("its files are gone; it serves until it is unloaded")
        if not self.engine.merges_rows:
            notes.append("its cache cannot be merged: requests take turns token by token")
        if self.engine.uncached is not None:
            notes.append(f"prompts are not kept: {self.engine.uncached}")
        return "; ".join(notes) or None
