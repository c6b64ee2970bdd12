"""The SSD tier: blocks and checkpoints of all models on disk, so that a restart, a crash or a reboot loses no prefix.

`SsdStore` is made once by the daemon; `ModelStore` is what one model's cache and engine use of it. All methods return
at once or run on the tier's own threads (one writer, a few readers) and give futures, except `close`. Whatever the disk
does, a prompt is computed as if nothing were stored: a failure here is a miss, counted here.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from omlxd.cache.disk import Disk
from omlxd.cache.explain import Explanation, explanation
from omlxd.cache.keys import MediaSpan, apart, chain, pack, unpack
from omlxd.cache.prefix import Standing
from omlxd.cache.sessions import Chain, Quota, Session, Sessions
from omlxd.cache.ssd_files import Limits
from omlxd.cache.ssd_format import Model, Record
from omlxd.cache.ssd_index import Totals
from omlxd.cache.ssd_plan import Plan, Step
from omlxd.cache.ssd_queue import WriteQueue
from omlxd.cache.ssd_reader import Reader, Unreadable
from omlxd.cache.ssd_volume import Place, Volume
from omlxd.cache.ssd_writer import Condition, Source, Writer
from omlxd.cache.store import BLOCK, CHECKPOINT, Name, Offer
from omlxd.cache.tree_view import Node

log = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20
ERRAND_S = 120.0  # a drive that hangs holds its thread, and must not hold a client for ever
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SsdStats:
    """The tier in one reading. `state` is "opening", "on", "paused" or "read_only", `reason` why if not on."""

    state: str
    reason: str | None
    used_bytes: int
    max_bytes: int
    queued_bytes: int
    counts: Mapping[str, int]


class SsdStore:
    """Owns the threads, the queue and the directory."""

    def __init__(
        self,
        directory: Path,
        *,
        memo: Path,
        max_bytes: int,
        min_free_bytes: int,
        quota: Quota,
        queue_bytes: int = QUEUE_BYTES,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`memo` is a file outside of the directory, on the disk that is always there; its folder exists."""
        self._disk = disk or Disk()
        self._place = Place(directory, memo)
        self._max_bytes = max_bytes
        self._queue = WriteQueue(queue_bytes)
        self._sessions = Sessions(self._disk, quota, clock)
        self._writer = Writer(
            self._place,
            Limits(max_bytes, min_free_bytes),
            self._queue,
            disk=self._disk,
            clock=clock,
            opened=self._opened,
        )
        self._reader = Reader(self._place, self._queue, self._writer, self._disk)
        self._models: dict[bytes, str] = {}
        self._writer.start()

    # -- for the daemon -----------------------------------------------------------------------------------------------

    def set_limits(self, limits: Limits, quota: Quota) -> None:
        """From any thread, at once. A lower cap is kept by evicting; what sessions hold stays."""
        self._max_bytes = limits.max_bytes
        self._sessions.quota = quota
        self._writer.set_limits(limits)

    def view(self, model: Model) -> ModelStore:
        if model.name:
            self._models[model.identity] = model.name
            self.run(lambda volume: volume.index.name(model.identity.hex(), model.name))
        return ModelStore(self, model)

    def feed_from(self, model: Model, source: Source) -> None:
        """`source` offers, on any thread, those of the named records that are in memory."""
        self._writer.sources[model.identity] = (model, source)

    def stats(self) -> SsdStats:
        condition: Condition = self._writer.condition
        counts = Counter(dict(self._writer.files.counts)) + self._reader.counts()
        return SsdStats(
            state=condition.state,
            reason=condition.reason,
            used_bytes=condition.used_bytes,
            max_bytes=self._max_bytes,
            queued_bytes=self._queue.waiting_bytes,
            counts=counts,
        )

    @property
    def queued_bytes(self) -> int:
        """Of what waits to be written; its arrays may be those of the hot tier."""
        return self._queue.waiting_bytes

    def totals(self) -> Mapping[str, Totals]:
        """What each model has on disk, by name; nothing while the disk cannot be asked."""
        return self._reader.look(lambda lookup: lookup.totals()) or {}

    def nodes(self, model: Model, limit: int) -> list[Node]:
        """Those of a model used last; on any thread that may wait."""
        rows = self._reader.look(lambda lookup: lookup.tree(model.identity.hex(), limit)) or []
        return [
            Node(
                entry.key.hex(),
                entry.parent.hex(),
                entry.start,
                entry.tokens,
                entry.kind == CHECKPOINT,
                entry.nbytes,
                pins,
                ssd=True,
                last_used=used,
            )
            for entry, used, pins in rows
        ]

    def failures_of(self, model: str) -> tuple[int, int]:
        """How many of a model's writes were dropped and how many of its files were bad, since the start."""
        mine = [identity for identity, name in self._models.items() if name == model]
        return sum(self._writer.files.dropped[each] for each in mine), sum(map(self._reader.bad_of, mine))

    # -- sessions, on any thread that may wait ------------------------------------------------------------------------

    def list_sessions(self, model: str | None) -> list[Session]:
        return self.run(lambda volume: self._sessions.all(model)).result(ERRAND_S)

    def use_session(self, model: str, name: str) -> Session:
        """Raises NoSuchSession."""
        return self.run(lambda volume: self._sessions.use(volume, model, name)).result(ERRAND_S)

    def delete_session(self, model: str, name: str) -> Session:
        """Raises NoSuchSession. What it held is cache again, like any other."""
        return self.run(lambda volume: self._sessions.delete(volume, model, name)).result(ERRAND_S)

    def save_session(
        self,
        model: Model,
        name: str,
        tokens: Sequence[int],
        pictures: Sequence[MediaSpan] = (),
        *,
        may_replace: bool,
        kept_apart: bytes = b"",
    ) -> Session:
        """Names the last position of `tokens` that can be brought back, and holds what leads there.

        Nothing is copied: what is on disk stays, what is in memory only is written first. Raises SessionIsThere,
        TooManySessions, and Unreadable when none of it is to be had.
        """
        media = (*apart(kept_apart), *pictures)
        self._write_chain(model, tokens, media)

        def save(volume: Volume) -> Session:
            kept = replace(self._chain(model, tokens, media), pictures=tuple(pictures), apart=kept_apart)
            return self._sessions.save(volume, model.name, name, model.identity, kept, may_replace=may_replace)

        return self.run(save).result(ERRAND_S)

    def _write_chain(self, model: Model, tokens: Sequence[int], media: Sequence[MediaSpan]) -> None:
        _, source = self._writer.sources[model.identity]
        specs = chain(model.identity, pack(tokens), media, model.block_size)
        names = {(BLOCK, spec.key) for spec in specs}
        for stop in range(max(1, len(tokens) - 1), len(tokens) + 1):
            *_, last = chain(model.identity, pack(tokens[:stop]), media, model.block_size)
            names |= {(BLOCK, last.key), (CHECKPOINT, last.key)}
        for offer in source(names):
            self._queue.offer(model, offer, always=True)
        self.written().result(ERRAND_S)

    def _chain(self, model: Model, tokens: Sequence[int], media: Sequence[MediaSpan]) -> Chain:
        specs = chain(model.identity, pack(tokens), media, model.block_size)
        plan = self._reader.plan(model, Standing(specs, 0, 0, len(tokens)))
        if not plan.position or any(step.record is not None for step in plan.steps):
            raise Unreadable(self._writer.condition.reason or "none of it could be kept on disk")
        held = tuple((step.kind, step.key) for step in plan.steps)
        return Chain(pack(tokens[: plan.position]), held, sum(step.nbytes for step in plan.steps))

    def verify(self, model: str | None) -> tuple[int, int, int]:
        """Sets index and files straight and reads every file; how many, how many bad, how much was put right.

        On any thread that may wait. Raises Unavailable, OSError, sqlite3.Error.
        """
        return self._reader.verify(model)

    def had_bad_file(self, parent: bytes) -> bool:
        """Whether a file that continued the block of this key was found to be bad since the start."""
        return self._reader.had_bad_file(parent)

    def clear(self, model: str | None) -> Future[int]:
        """Removes one model's files, or all, but for what sessions hold; gives the bytes."""

        def remove(volume: Volume) -> int:
            freed = 0
            for identity in volume.index.identities(model):
                self._queue.drop_model(bytes.fromhex(identity))
                freed += self._writer.remove_all(volume, identity)
            return freed

        return self.run(remove)

    def close(self, within_s: float) -> int:
        """Writes what waits, for at most so long, and ends the threads; returns how many records were not written."""
        dropped = self._writer.close(within_s)
        self._reader.close()
        if dropped:
            log.warning("stopped before %d blocks of the cache were on disk; they will be computed again", dropped)
        return dropped

    def run(self, errand: Callable[[Volume], T]) -> Future[T]:
        """Does something with the directory, on the writer thread. May raise Unavailable, OSError, sqlite3.Error."""
        return self._writer.run(errand)

    def written(self) -> Future[None]:
        """Done when everything offered so far has been written, refused or dropped, and the files are set straight."""
        return self._writer.written()

    # -- for the views ------------------------------------------------------------------------------------------------

    def offer(self, model: Model, offer: Offer) -> None:
        self._queue.offer(model, offer)

    def takes(self, nbytes: int) -> bool:
        return self._writer.condition.state in ("opening", "on") and self._queue.has_room(nbytes)

    def missed(self, model: Model, names: Iterable[Name]) -> None:
        self._queue.note_missed(model.identity, names)

    def used(self, keys: Iterable[bytes]) -> None:
        self._queue.used(keys)

    def submit_plan(self, model: Model, standing: Standing) -> Future[Plan]:
        return self._reader.submit_plan(model, standing)

    def submit_read(self, model: Model, step: Step) -> Future[Record]:
        return self._reader.submit_read(model, step)

    def _opened(self, volume: Volume) -> None:
        self._reader.forget_index()
        self._sessions.opened(volume)


class ModelStore:
    """One model's view of the tier: `cache.store.BlockStore`, and the way back."""

    def __init__(self, store: SsdStore, model: Model) -> None:
        self.store = store
        self.model = model

    def feed_from(self, source: Source) -> None:
        """Where records are to be had again that the queue had no room for."""
        self.store.feed_from(self.model, source)

    def offer(self, offer: Offer) -> None:
        self.store.offer(self.model, offer)

    def takes(self, nbytes: int) -> bool:
        return self.store.takes(nbytes)

    def missed(self, names: Iterable[Name]) -> None:
        self.store.missed(self.model, names)

    def used(self, keys: Iterable[bytes]) -> None:
        self.store.used(keys)

    def explained(self, plan: Plan, found: Explanation, tokens: Sequence[int]) -> Explanation:
        """`found` is why memory has no more of a prompt; this is why disk and memory together have no more."""
        if plan.position <= found.usable_tokens:
            return found
        return explanation(
            tokens,
            (),
            usable=plan.position,
            reach=plan.reach,
            stored=unpack(plan.stored),
            recurrent=self.model.recurrent > 0,
        )

    def ends_in_bad_file(self, standing: Standing, usable: int) -> bool:
        """Whether the block at which a prompt's usable tokens end had a bad file."""
        at = usable // self.model.block_size
        return self.store.had_bad_file(standing.specs[at - 1].key if at else self.model.identity)

    def plan(self, standing: Standing) -> Future[Plan]:
        """What the disk has beyond what stands in memory."""
        return self.store.submit_plan(self.model, standing)

    def read(self, step: Step) -> Future[Record]:
        """One step's record; raises Unreadable."""
        return self.store.submit_read(self.model, step)
