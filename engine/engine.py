"""One loaded model's engine as the event loop sees it: a thread, its inbox and the streams of its live requests.

The handle never waits for the thread: commands go into the inbox, a step's events come back in one
`call_soon_threadsafe`. It counts the live requests, so that a full queue is refused at once, and when the thread ends,
however it ends, everyone who still waits gets an answer.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from omlxd.cache.prefix import PrefixCache
from omlxd.engine.api import (
    Cancelled,
    EngineFailed,
    GenerateRequest,
    GenerationResult,
    ModelMetrics,
    OmlxError,
    Prompt,
    QueueFull,
    RequestInfo,
    Unsupported,
)
from omlxd.engine.boundaries import boundaries
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.inbox import Abort, Ask, Close, Closed, Inbox, Preempt, Refuse, Submit
from omlxd.engine.job import Job
from omlxd.engine.model import LoadedModel, ModelFacts
from omlxd.engine.picture_tensors import PictureTensors
from omlxd.engine.pictures import Pictures
from omlxd.engine.preparing import Prepared, Preparer
from omlxd.engine.prompt import text_of
from omlxd.engine.reporting import Events
from omlxd.engine.request import Clock
from omlxd.engine.scheduler import SchedulerLimits
from omlxd.engine.stream import EventStream
from omlxd.engine.worker import Worker

if TYPE_CHECKING:
    from omlxd.engine.images import Picture
    from omlxd.engine.vision_inputs import Apart, PictureInput

log = logging.getLogger(__name__)
T = TypeVar("T")

# What a client refused for a full queue is told before any request has ended here, and the least it is told after.
FIRST_RETRY_MS, LEAST_RETRY_MS = 1000, 100


class Engine:
    """The loop's handle on one engine thread. `closed` is set once, when the thread has let go of the model."""

    def __init__(
        self,
        loaded: LoadedModel,
        limits: SchedulerLimits,
        clock: Clock = time.monotonic,
        guard: MemoryGuard | None = None,
        threads: ThreadPoolExecutor | None = None,
        pictures: Pictures | None = None,
        picture_bytes: int = 0,
    ) -> None:
        """Takes `loaded` over: whoever made it must drop it, or the model outlives its engine.

        `guard` is shared by all engines; without one there is no limit. So are `threads`: one of them is this engine's
        until it closes and then free for another's, because mlx keeps a stream's own thread for ever. `picture_bytes`
        may be kept of what the processor makes of pictures.
        """
        self.facts: ModelFacts = loaded.facts
        self.store = loaded.store
        self._tokenizer = loaded.tokenizer
        self._wants_boundaries = loaded.cache is not None and loaded.cache.recurrent
        # One thread: a tokenizer is used by one prompt at a time, and a long one holds up neither loop nor engine.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix=f"tokenizer-{loaded.facts.name}")
        self._preparer = Preparer(loaded.tokenizer, loaded.facts, loaded.sight)
        self._sight = loaded.sight
        # Another one, for a large photograph takes a processor a second, and texts need not wait for it.
        self._processing = ThreadPoolExecutor(1, thread_name_prefix=f"processor-{loaded.facts.name}")
        # Read before a prompt is prepared, on threads of their own; a model that sees none refuses them unread.
        self._pictures = pictures if loaded.sight is not None else None
        guard = guard or MemoryGuard()
        self._tensors = PictureTensors(loaded.facts.name, guard.ledger, picture_bytes)
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox()
        self._live: dict[str, EventStream] = {}
        self._asked: set[Future[Any]] = set()
        self._mean_s: float | None = None
        self.closed: asyncio.Future[Closed] = self._loop.create_future()
        self._worker = Worker(loaded, limits, self._inbox, self._emit, clock, guard, self._short)
        self.merges_rows = self._worker.merges_rows
        threads = threads if threads is not None else ThreadPoolExecutor(1, thread_name_prefix="engine")
        threads.submit(self._main)

    @property
    def requests(self) -> Sequence[RequestInfo]:
        """The live requests, as of a tenth of a second ago at most while the engine is busy."""
        return self._worker.requests

    @property
    def metrics(self) -> ModelMetrics:
        """What this engine has done, as old as `requests` at most."""
        return self._worker.metrics

    @property
    def uncached(self) -> str | None:
        """Why prompts are not kept; None when they are."""
        return self._worker.uncached

    async def token_ids(self, prompt: Prompt) -> Sequence[int]:
        """The prompt as the model reads it. Raises InvalidParams, Unsupported."""
        async with self._shown(prompt) as pictures:
            apart = await self._apart(pictures)
            return await self._tokenize(self._preparer.token_ids, prompt, pictures, apart)

    def _shown(self, prompt: Prompt) -> AbstractAsyncContextManager[Sequence[Picture]]:
        """The pictures that a conversation shows. Raises InvalidParams, Unsupported, MemoryExceeded."""
        return nullcontext(()) if self._pictures is None else self._pictures.shown(prompt)

    async def boundaries(self, prompt: Prompt, ids: Sequence[int]) -> Sequence[int]:
        """Where checkpoints are worth taking in a prompt; nowhere for a model whose state can be cut anywhere."""
        if not self._wants_boundaries:
            return ()
        return await self._tokenize(boundaries, prompt, ids, self._tokenizer, self.facts)

    async def prepare(self, request: GenerateRequest) -> Prepared:
        """A request's prompt and how its answer is read. Raises InvalidParams, Unsupported."""
        async with self._shown(request.prompt) as pictures:
            apart = await self._apart(pictures)
            return await self._tokenize(self._preparer.prepare, request, pictures, apart)

    async def _apart(self, pictures: Sequence[Picture]) -> Mapping[bytes, Apart]:
        """What the processor makes of each picture, or has made; nothing if it must see whole prompts."""
        if self._sight is None or self._sight.mark is None:
            return {}
        made: dict[bytes, Apart] = {}
        for picture in pictures:
            apart = made.get(picture.digest) or self._tensors.kept(picture.digest)
            if apart is None:
                apart = await self._on(self._processing, self._sight.apart, picture)
                apart = self._tensors.keep(picture.digest, apart)
            made[picture.digest] = apart
        return made

    def _short(self) -> None:
        """Memory is short. On the engine thread."""
        if self._tensors.kept_bytes:
            self._loop.call_soon_threadsafe(self._tensors.drop_kept)

    def holding(self, pictures: Sequence[PictureInput]) -> AbstractContextManager[None]:
        """Has a prepared request's pictures in the ledger until it has ended."""
        return self._tensors.holding(pictures)

    async def text(self, ids: Sequence[int]) -> str:
        """What the ids stand for, special tokens included. Raises InvalidParams."""
        return await self._tokenize(text_of, ids, self._tokenizer, self.facts)

    async def _tokenize(self, work: Callable[..., T], *args: Any) -> T:
        """Runs `work` on the tokenizer thread."""
        return await self._on(self._tokenizing, work, *args)

    async def _on(self, thread: ThreadPoolExecutor, work: Callable[..., T], *args: Any) -> T:
        """Runs `work` on a thread of this engine's. Who waits for it is told when the engine ends first."""
        if self.closed.done():
            raise self._gone()
        task = self._loop.run_in_executor(thread, functools.partial(work, *args))
        try:
            either: list[asyncio.Future[Any]] = [task, self.closed]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._gone()
            return task.result()
        finally:
            task.cancel()

    def _gone(self) -> OmlxError:
        """What a request is told that comes, or is left, when the engine has ended."""
        failure = self.closed.result().failure
        return Cancelled(reason="model unloaded") if failure is None else EngineFailed(self.facts.name, failure)

    async def ask_cache(self, question: Callable[[PrefixCache], T]) -> T:
        """Asks the model's prefix cache, on the engine thread between two steps; a question must be quick.

        Raises what the question raises, Unsupported without a cache, EngineFailed when the engine has ended.
        """
        if self.closed.done():
            raise EngineFailed(self.facts.name, "the engine has ended")
        answer: Future[T] = Future()

        def call(cache: PrefixCache | None) -> None:  # on the engine thread
            if not answer.set_running_or_notify_cancel():
                return  # who asked has left
            try:
                if cache is None:
                    raise Unsupported("the prefix cache", self.uncached or "this model runs without it")
                answer.set_result(question(cache))
            except Exception as exc:  # noqa: BLE001  it is the asker's, as with an executor; the rows have no part in it
                answer.set_exception(exc)

        self._asked.add(answer)
        try:
            self._inbox.put(Ask(call))
            return await asyncio.wrap_future(answer)
        finally:
            self._asked.discard(answer)

    def submit(self, job: Job, stream: EventStream) -> None:
        """Queues a job. Raises QueueFull, or Cancelled or EngineFailed when the engine has ended."""
        if self.closed.done():
            raise self._gone()
        if len(self._live) >= self._limits.max_batch + self._limits.max_queue:
            raise QueueFull(self._limits.max_queue, self._retry_ms())
        self._live[job.id] = stream
        self._inbox.put(Submit(job))

    def abort(self, id: str, reason: str | None) -> None:
        self._inbox.put(Abort(id, reason))

    def relieve(self, command: Preempt | Refuse) -> None:
        """Asks the thread to take a request out of its place, or to end it, for the memory that it holds."""
        self._inbox.put(command)

    def close(self, command: Close) -> None:
        """Asks the thread to end; `closed` tells when it has."""
        self._inbox.put(command)

    def _retry_ms(self) -> int:
        """When a place should be free: a queue's worth of requests, a batch at a time, at the rate of the latest."""
        if self._mean_s is None:
            return FIRST_RETRY_MS
        return max(LEAST_RETRY_MS, round(self._mean_s * 1e3 / self._limits.max_batch))

    # -- the thread's side --------------------------------------------------------------------------------------------

    def _main(self) -> None:
        threading.current_thread().name = f"engine-{self.facts.name}"
        try:
            closed = self._worker.run()
        except Exception as exc:  # the top of the thread: whatever went wrong, nobody may be left waiting
            log.exception("the engine thread of %s died", self.facts.name)
            closed = Closed(f"{type(exc).__name__} in the engine thread", 0)
        self._loop.call_soon_threadsafe(self._ended, closed)

    def _emit(self, events: Events) -> None:
        self._loop.call_soon_threadsafe(self._deliver, events)

    # -- back on the loop ---------------------------------------------------------------------------------------------

    def _deliver(self, events: Events) -> None:
        for id, event in events:
            stream = self._live[id]
            if isinstance(event, (GenerationResult, OmlxError)):
                del self._live[id]
                if isinstance(event, GenerationResult):
                    self._remember(event.timings.prefill_ms + event.timings.decode_ms)
            stream.deliver(event)

    def _remember(self, took_ms: float) -> None:
        self._mean_s = took_ms / 1e3 if self._mean_s is None else 0.8 * self._mean_s + 0.2 * took_ms / 1e3

    def _ended(self, closed: Closed) -> None:
        self.closed.set_result(closed)
        for stream in self._live.values():
            stream.deliver(self._gone())
        self._live.clear()
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(EngineFailed(self.facts.name, closed.failure or "the engine has ended"))
        self._tokenizing.shutdown(wait=False)
        self._processing.shutdown(wait=False)
        self._tensors.drop_kept()
