"""Requests as the daemon sees them: their beginnings and ends are events, and what cannot be warmed is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from omlxd.daemon.events import EventHub
from omlxd.daemon.generations import Generations
from omlxd.daemon.sessions import Sessions
from omlxd.engine.api import GenerateRequest, GenerationResult, Json, Prompt, QueueFull, TextPrompt, Unsupported, Usage
from omlxd.engine.disk_cache import DiskCache
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.job import Job
from omlxd.engine.pool import Pool
from omlxd.engine.preparing import Prepared
from omlxd.engine.stream import EventStream
from tests.engine.test_pool import FakeBackend, FakeEngine, pool


class AnsweringEngine(FakeEngine):
    """Has an answer to everything, and records what it was asked."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.jobs: list[Job] = []

    async def prepare(self, request: GenerateRequest) -> Prepared:
        return Prepared(request.prompt, [1, 2, 3])

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
