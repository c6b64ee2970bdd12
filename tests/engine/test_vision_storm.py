"""Whatever conversations come, in whatever order, and whoever leaves: each answer is mlx-vlm's for it alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from omlxd.engine.api import Cancelled, EngineFailed, GenerationResult, MemoryExceeded
from omlxd.engine.engine import Engine
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.inbox import Close
from omlxd.engine.kv_cost import costs_of
from omlxd.engine.model import LoadedModel
from omlxd.engine.scheduler import SchedulerLimits
from omlxd.engine.vision_inputs import PIXELS, PictureInput
from tests.engine.running import Running, engine
from tests.engine.seeing import Part, Turn, answers, assert_is_mlx_vlms, cached, chat, says
from tests.engine.test_guard import limits
from tests.vision_models import FAMILIES, picture

SIZES = [(1, 1), (28, 28), (84, 84), (57, 13), (13, 57), (140, 84), (30, 200), (112, 112)]
LOOKS: list[int | str] = [1, 2, "red"]
WORDS = ["What is this?", "a", " and ", "\n\n", "a text that is long enough to reach over some blocks of the cache, "]


def _parts(draw: random.Random) -> list[Part]:
    """Texts and pictures in any order: pictures first, last, one after another, or none."""
    return [_picture(draw) if draw.random() < 0.5 else draw.choice(WORDS) for _ in range(draw.randint(1, 3))]


def _picture(draw: random.Random) -> Image.Image:
    return picture(draw.choice(LOOKS), draw.choice(SIZES))


def _conversation(draw: random.Random, earlier: Sequence[Sequence[Turn]]) -> list[Turn]:
    """A new one, or one that goes on from an earlier one."""
    short = [turns for turns in earlier if len(turns) < 3]  # two questions fit into the tiny models' context
    before = list(draw.choice(short)) if short and draw.random() < 0.6 else []
    if before:
        before.append(answers(draw.choice(["Yes.", "It is a thing, I think."])))
    return [*before, says(*_parts(draw))]


async def _storm(draw: random.Random, running: Engine, model: LoadedModel, *, requests: int) -> int:
    """Sends conversations, lets some clients leave, and returns how many answers were compared."""
    asked: list[list[Turn]] = []
    under_way = []
    for _ in range(requests):
        turns = _conversation(draw, asked)
        job = chat(
            model,
            turns,
            max_tokens=draw.randint(1, 10),
            stream=True,
            batch_priority=draw.random() < 0.4,
            use_cache=draw.random() < 0.9,
        )
        asked.append(turns)
        under_way.append((turns, Running(running, job)))
        if draw.random() < 0.4:
            await _answer(under_way[0][1])  # the others are somewhere on their way
        if draw.random() < 0.2:
            draw.choice(under_way)[1].stream.cancel()
    compared = 0
    for turns, each in under_way:
        result = await _answer(each)
        if result is not None and result.token_ids:
            assert_is_mlx_vlms(model.facts.name, turns, result)
            compared += 1
    return compared


async def _answer(each: Running) -> GenerationResult | None:
    """All of it, or what there was when its client left; None where memory was refused."""
    try:
        return await each.result()
    except MemoryExceeded:
        return None
    except Cancelled as cancelled:
        return cancelled.partial


async def _run(draw: random.Random, model: LoadedModel, guard: MemoryGuard, *, requests: int) -> int:
    chosen = SchedulerLimits(prefill_chunk=draw.choice([5, 16, 512]), max_batch=draw.choice([1, 2, 4]))
    running = Engine(model, chosen, guard=guard)
    try:
        return await _storm(draw, running, model, requests=requests)
    finally:
        running.close(Close("unloaded"))
        await asyncio.wait_for(running.closed, 30)
        guard.ledger.check()
        assert guard.ledger.total() == 0


def _sound(model: LoadedModel) -> None:
    """The books of both caches add up, and nobody who has gone holds anything."""
    assert model.cache is not None
    assert model.prefills is not None
    model.cache.check()
    assert model.cache.stats().pinned_nbytes == 0
    model.prefills.features.check()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
def test_any_conversations_with_pictures_are_answered_as_if_alone(family: str, seed: int) -> None:
    draw = random.Random(seed)
    model = cached(family, block_size=draw.choice([4, 16]), feature_bytes=draw.choice([0, 3000, 1 << 20]))
    assert asyncio.run(_run(draw, model, MemoryGuard(), requests=8)) > 2
    _sound(model)


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_so_they_are_where_memory_is_short(family: str) -> None:
    draw = random.Random(7)
    plain = cached(family, block_size=8)
    model = replace(plain, costs=costs_of(plain))
    assert asyncio.run(_run(draw, model, MemoryGuard(limits=limits(4 << 20)), requests=8)) > 0
    _sound(model)


def _torn(picture: PictureInput) -> PictureInput:
    return replace(picture, tensors={**picture.tensors, PIXELS: np.zeros((3, 3))})


def test_bad_pictures_in_a_row_end_neither_the_engine_nor_an_answer_under_way() -> None:
    """Five whose tensors the tower cannot take; three steps in a row that fail would end the engine."""
    model = cached("qwen2_vl")
    talk = [says("Talk for long.")]

    async def main() -> None:
        async with engine(model) as running:
            talking = Running(running, chat(model, talk, 60, stream=True))
            await talking.first_token()
            bad = [chat(model, [says(picture(look), "What is this?")]) for look in range(5)]
            failing = [Running(running, replace(job, pictures=[_torn(*job.pictures)])) for job in bad]
            for each in failing:
                with pytest.raises(EngineFailed, match="in its vision tower"):
                    await each.result()
            assert_is_mlx_vlms("qwen2_vl", talk, await talking.result())
            assert running.metrics.counters["failed_steps"] == 0

    asyncio.run(main())
    _sound(model)
