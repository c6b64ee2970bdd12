"""Many clients at once: whatever overlaps, comes or goes, each finished answer is its cold run; nothing is left."""

from __future__ import annotations

import asyncio
import random

import pytest

from omlxd.engine import prompts
from omlxd.engine.api import Cancelled, GenerationResult, OmlxError, QueueFull
from omlxd.engine.model import LoadedModel
from tests.engine.running import Running, assert_is_the_cold_run, cached, engine, job
from tests.models import MODELS

CLIENTS, REQUESTS = 8, 5


def overlapping_prompt(draw: random.Random) -> tuple[list[int], list[int]]:
    """One of three shared beginnings, cut anywhere, and a tail of its own; and where its messages end."""
    stem = random.Random(draw.randrange(3))
    beginning = [stem.randrange(256) for _ in range(60)][: draw.randrange(20, 61)]
    return [*beginning, *(draw.randrange(256) for _ in range(draw.randrange(1, 25)))], [len(beginning)]


@pytest.mark.parametrize("copies", [0, prompts.COPIES])
@pytest.mark.parametrize("name", MODELS)
def test_eight_clients_with_overlapping_prompts_each_get_the_cold_run(
    name: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "COPIES", copies)  # with none, rows enter together whatever they have computed
    model = cached(name, hot_bytes=400_000)  # small enough that blocks are evicted while it runs
    draw = random.Random(name)

    async def client(running: object) -> list[GenerationResult]:
        results = []
        for _ in range(REQUESTS):
            await asyncio.sleep(draw.random() * 0.05)
            prompt, boundaries = overlapping_prompt(draw)
            settings = {"logprobs": 20, "boundaries": boundaries, "batch_priority": draw.random() < 0.4}
            each = Running(running, job(prompt, draw.randrange(1, 24), **settings))  # type: ignore[arg-type]
            if draw.random() < 0.25:
                await asyncio.sleep(draw.random() * 0.03)
                each.stream.cancel()
            try:
                results.append(await each.result())
            except Cancelled:
                continue
        return results

    async def main() -> list[GenerationResult]:
        limits = {"max_batch": draw.randrange(2, 7), "prefill_chunk": draw.choice([16, 23, 48])}
        async with engine(model, **limits) as running:
            results = await asyncio.gather(*(client(running) for _ in range(CLIENTS)))
        return [result for each in results for result in each]

    results = asyncio.run(main())
    assert len(results) > CLIENTS
    for result in results:
        assert_is_the_cold_run(model.model, result)
    assert any(result.usage.cached_tokens for result in results)
    assert_nothing_is_left(model)


def test_thousands_of_submits_cancels_and_disconnects_leave_nothing_behind() -> None:
    model = cached("llama", hot_bytes=300_000)
    draw = random.Random(1)
    outcomes: dict[str, int] = {}

    async def one(running: object) -> None:
        prompt, _ = overlapping_prompt(draw)
        try:
            each = Running(running, job(prompt, draw.randrange(1, 6), batch_priority=draw.random() < 0.5))  # type: ignore[arg-type]
        except QueueFull:
            outcomes["refused"] = outcomes.get("refused", 0) + 1
            return
        for _ in range(draw.randrange(3)):
            await asyncio.sleep(draw.random() * 0.01)
            each.stream.cancel()
        try:
            await each.result()
            outcomes["finished"] = outcomes.get("finished", 0) + 1
        except OmlxError as error:
            outcomes[error.kind] = outcomes.get(error.kind, 0) + 1

    async def main() -> None:
        async with engine(model, max_batch=8, max_queue=64, prefill_chunk=32) as running:
            for _ in range(60):
                await asyncio.gather(*(one(running) for _ in range(50)))
            assert (await Running(running, job([1, 2, 3], 1)).result()).text is not None
            assert running.requests == ()

    asyncio.run(main())
    assert sum(outcomes.values()) == 3000
    assert set(outcomes) == {"finished", "cancelled"}
    assert min(outcomes.values()) > 300
    assert_nothing_is_left(model)


def assert_nothing_is_left(model: LoadedModel) -> None:
    assert model.cache is not None
    model.cache.check()
    assert model.cache.stats().pinned_nbytes == 0
