"""Requests as the daemon sees them: their beginnings and ends are events, and what cannot be warmed is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import pytest

from omlxd.cache.keys import MediaSpan
from omlxd.daemon.events import EventHub
from omlxd.daemon.generations import Generations
from omlxd.daemon.sessions import Sessions
from omlxd.engine.api import (
    Cancelled,
    GenerateRequest,
    GenerationResult,
    Json,
    Prompt,
    QueueFull,
    TextPrompt,
    Unsupported,
    Usage,
)
from omlxd.engine.disk_cache import DiskCache
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.job import Job
from omlxd.engine.ledger import Ledger
from omlxd.engine.picture_tensors import PictureTensors
from omlxd.engine.pool import Pool
from omlxd.engine.preparing import Prepared
from omlxd.engine.stream import EventStream
from omlxd.engine.vision_inputs import PictureInput
from tests.engine.test_pool import FakeBackend, FakeEngine, pool


class AnsweringEngine(FakeEngine):
    """Has an answer to everything, and records what it was asked."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.jobs: list[Job] = []
        self.ledger = Ledger()
        self.tensors = PictureTensors(name, self.ledger)

    async def prepare(self, request: GenerateRequest) -> Prepared:
        return Prepared(request.prompt, [1, 2, 3])

    def holding(self, pictures: Sequence[PictureInput]) -> AbstractContextManager[None]:
        return self.tensors.holding(pictures)

    async def boundaries(self, prompt: Prompt, ids: Sequence[int]) -> Sequence[int]:
        return ()

    def submit(self, job: Job, stream: EventStream) -> None:
        self.jobs.append(job)
        stream.deliver(GenerationResult(job.model, "", "stop", Usage(prompt_tokens=len(job.prompt))))


class Backend(FakeBackend):
    def start(self, loaded: object) -> FakeEngine:
        self.engines.append(AnsweringEngine("a"))
        return self.engines[-1]


def no_sessions(models: Pool) -> Sessions:
    return Sessions(DiskCache(None), models, MemoryGuard())


def test_a_requests_beginning_and_end_are_events_without_its_text() -> None:
    async def main() -> list[Mapping[str, Json]]:
        async with pool(Backend()) as models:
            events = EventHub()
            told = aiter(events.subscribe(["requests"]))
            generations = Generations(models, events, no_sessions(models))
            for model in ("a", "missing"):
                await generations.start(GenerateRequest(model, TextPrompt("my secret"))).wait_ended()
                while generations.infos():
                    await asyncio.sleep(0)
            return [(await anext(told))[0].fields for _ in range(4)]

    assert asyncio.run(main()) == [
        {"what": "started", "id": "g1", "model": "a"},
        {"what": "ended", "id": "g1", "model": "a", "outcome": "finished"},
        {"what": "started", "id": "g2", "model": "missing"},
        {"what": "ended", "id": "g2", "model": "missing", "outcome": "model_not_found"},
    ]


def test_warming_is_a_job_and_needs_a_cache() -> None:
    request = GenerateRequest("a", TextPrompt("x"), warm=True)

    async def main() -> list[bool]:
        backend = Backend()
        async with pool(backend) as models:
            generations = Generations(models, EventHub(), no_sessions(models))
            assert (await generations.start(request).result()).usage.prompt_tokens == 3
            backend.engines[0].uncached = "no layout for FooCache"
            with pytest.raises(Unsupported, match="FooCache"):
                await generations.start(request).result()
            engine = backend.engines[0]
            assert isinstance(engine, AnsweringEngine)
            return [job.warm for job in engine.jobs]

    assert asyncio.run(main()) == [True]


def test_nobody_waits_for_a_model_for_ever() -> None:
    async def main() -> QueueFull:
        backend = Backend()
        backend.gate.clear()  # the load does not end
        async with pool(backend) as models:
            generations = Generations(models, EventHub(), no_sessions(models), longest_wait_s=0.01)
            with pytest.raises(QueueFull) as caught:
                await generations.start(GenerateRequest("a", TextPrompt("x"))).result()
            return caught.value

    error = asyncio.run(main())
    assert error.fields == {"depth": 1, "retry_after_ms": 60_000}
    assert "the longest allowed" in error.message


SHOWN = PictureInput(MediaSpan(1, 2, bytes(32)), {"pixel_values": np.zeros(10, np.float32)})


class QueueingEngine(AnsweringEngine):
    """Takes requests with a picture into its queue, where they stay until they are cancelled."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.waiting: dict[str, EventStream] = {}
        self.full = False

    async def prepare(self, request: GenerateRequest) -> Prepared:
        return Prepared(request.prompt, [1, 2, 3], pictures=[SHOWN])

    def submit(self, job: Job, stream: EventStream) -> None:
        if self.full:
            raise QueueFull(1, 1)
        self.waiting[job.id] = stream

    def abort(self, id: str, reason: str | None) -> None:
        self.waiting.pop(id).deliver(Cancelled(reason=reason))


class QueueingBackend(FakeBackend):
    def start(self, loaded: object) -> FakeEngine:
        self.engines.append(QueueingEngine("a"))
        return self.engines[-1]


def test_what_waiting_requests_have_of_pictures_is_in_the_ledger_until_they_are_cancelled() -> None:
    request = GenerateRequest("a", TextPrompt("x"))

    async def main() -> list[int]:
        backend = QueueingBackend()
        async with pool(backend) as models:
            generations = Generations(models, EventHub(), no_sessions(models))
            first, second = generations.start(request), generations.start(request)
            while not backend.engines or len(engine_of(backend).waiting) < 2:
                await asyncio.sleep(0)
            engine, seen = engine_of(backend), []
            for stream in (first, second):
                seen.append(engine.ledger.held(["pictures"]))
                stream.cancel()
                await stream.wait_ended()
                while len(generations.infos()) == 2:
                    await asyncio.sleep(0)
            while generations.infos():
                await asyncio.sleep(0)
            engine.full = True
            with pytest.raises(QueueFull):
                await generations.start(request).result()
            while generations.infos():
                await asyncio.sleep(0)
            return [*seen, engine.ledger.total()]

    assert asyncio.run(main()) == [40, 40, 0]  # the same tensors, counted once


def engine_of(backend: QueueingBackend) -> QueueingEngine:
    (engine,) = backend.engines
    assert isinstance(engine, QueueingEngine)
    return engine
