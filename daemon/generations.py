"""Generations under way: from a request to its job in an engine, and the lease that keeps the model meanwhile.

Lives on the event loop. One task per request: it leases the model (loading it if need be), has the prompt turned into
token ids, submits the job and holds the lease until the end. A cancellation goes to the engine once it has the job;
before that it ends the task.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from omlxd.daemon.events import EventHub
from omlxd.daemon.logs import CONTENT
from omlxd.daemon.sessions import Sessions
from omlxd.engine.api import (
    Cancelled,
    EngineFailed,
    GenerateRequest,
    GenerationResult,
    OmlxError,
    Progress,
    QueueFull,
    RequestInfo,
    ShuttingDown,
    Unsupported,
    Usage,
)
from omlxd.engine.job import make_job
from omlxd.engine.pictures import legible
from omlxd.engine.pool import Pool
from omlxd.engine.slot import EngineHandle
from omlxd.engine.stream import EventStream

LONGEST_WAIT_S = 3600.0  # for a model; the engine has the same for a row
RETRY_MS = 60_000  # for whoever has waited in vain

log = logging.getLogger(__name__)
content = logging.getLogger(CONTENT)


class Generations:
    """All requests that have not ended."""

    def __init__(
        self, pool: Pool, events: EventHub, sessions: Sessions, *, longest_wait_s: float = LONGEST_WAIT_S
    ) -> None:
        self._pool = pool
        self._sessions = sessions
        self._longest_wait_s = longest_wait_s
        self._events = events
        self._ids = itertools.count(1)
        self._live: dict[str, _Live] = {}
        self._refuse = False
        self.counts: Counter[str] = Counter()

    def start(self, request: GenerateRequest) -> EventStream:
        """Starts a request; whatever it comes to arrives in the stream."""
        live = _Live(f"g{next(self._ids)}", request, self._pool, self._sessions, self._longest_wait_s)
        self.counts["started"] += 1
        if self._refuse:
            live.stream.deliver(ShuttingDown())
            self.counts["refused"] += 1
            return live.stream
        self._live[live.id] = live
        self._events.publish("requests", what="started", id=live.id, model=request.model)
        live.begin(self._ended)
        return live.stream

    def refuse_new(self) -> None:
        """From now on every new request gets ShuttingDown; those under way go on."""
        self._refuse = True

    def end_all(self) -> None:
        """Ends with ShuttingDown what no engine has yet; the pool's close ends the rest."""
        self._refuse = True
        for live in list(self._live.values()):
            live.shut_down()

    def infos(self) -> Sequence[RequestInfo]:
        """Every live request, those that still wait for their model included."""
        running = {info.id: info for info in self._pool.requests()}
        return [running.get(live.id) or live.info() for live in self._live.values()]

    def _ended(self, live: _Live, outcome: str) -> None:
        self._live.pop(live.id, None)
        self.counts[outcome] += 1
        self._events.publish("requests", what="ended", id=live.id, model=live.model, outcome=outcome)


class _Live:
    """One request's task."""

    def __init__(
        self, id: str, request: GenerateRequest, pool: Pool, sessions: Sessions, longest_wait_s: float
    ) -> None:
        self.id = id
        self._longest_wait_s = longest_wait_s
        self.stream = EventStream(self._cancel)
        self._request = request
        self._pool = pool
        self._sessions = sessions
        self._arrived = time.monotonic()
        self._waits_for = "the model"
        self._engine: EngineHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def model(self) -> str:
        return self._request.model

    def begin(self, ended: Callable[[_Live, str], None]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"generation-{self.id}")
        self._task.add_done_callback(lambda _: ended(self, self.stream.outcome))

    def info(self) -> RequestInfo:
        """What is known before the engine has the request."""
        age_s = time.monotonic() - self._arrived
        return RequestInfo(self.id, self._request.model, "QUEUED", 0, 0, 0, age_s, f"waits for {self._waits_for}")

    def shut_down(self) -> None:
        self._end_early(ShuttingDown())

    def _cancel(self, reason: str | None) -> None:
        if self._engine is not None:
            self._engine.abort(self.id, reason)
            return
        self._end_early(self._cancelled(reason))

    def _cancelled(self, reason: str | None) -> Cancelled:
        return Cancelled(GenerationResult(self._request.model, "", "cancelled", Usage()), reason)

    def _end_early(self, error: OmlxError) -> None:
        """Ends a request that no engine has; one that has it ends it itself."""
        if self._engine is None and self._task is not None:
            self.stream.deliver(error)
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._generate()
        except Cancelled as error:  # its model was unloaded while it loaded
            self.stream.deliver(self._cancelled(error.reason))
        except OmlxError as error:
            self.stream.deliver(error)
        except asyncio.CancelledError:
            # Cancelled by `_end_early`, which has answered, or by the loop's end, after which nobody listens.
            self.stream.deliver(ShuttingDown())
        except TimeoutError:
            waited_s = time.monotonic() - self._arrived
            self.stream.deliver(QueueFull(1, RETRY_MS, waited_s=waited_s))
        except Exception as exc:  # the top of this task: whatever went wrong, the client has an answer to wait for
            log.exception("request %s failed before it reached its engine", self.id)
            self.stream.deliver(EngineFailed(self._request.model, type(exc).__name__))

    async def _generate(self) -> None:
        request = self._request
        if content.isEnabledFor(logging.INFO):
            content.info("%s asks %s: %s", self.id, request.model, legible(request.prompt))
        self._report(Progress("queued"))
        async with (
            asyncio.timeout(self._longest_wait_s) as wait,
            self._pool.lease(request.model, autoload=request.autoload, progress=self._report) as engine,
        ):
            if request.warm and engine.uncached is not None:
                raise Unsupported("cache.warm", f"{engine.facts.name} keeps no prompts: {engine.uncached}")
            session = None if request.session is None else await self._sessions.use(engine, request.session)
            self._waits_for = "its tokens"
            prepared = await engine.prepare(request)
            with engine.holding(prepared.pictures):
                boundaries = await engine.boundaries(prepared.prompt, prepared.token_ids)
                apart = b"" if session is None else session.apart
                job = make_job(
                    request,
                    prepared,
                    engine.facts,
                    id=self.id,
                    arrived=self._arrived,
                    boundaries=boundaries,
                    apart=apart,
                )
                wait.reschedule(None)
                engine.submit(job, self.stream)
                self._engine = engine
                result = await self.stream.result()
            if session is not None:
                self._sessions.keep(engine, session, result)
            content.info("%s was answered: %s%s", self.id, result.reasoning or "", result.text)

    def _report(self, progress: Progress) -> None:
        if self._request.progress:
            self.stream.deliver(progress)
