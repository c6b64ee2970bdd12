"""What a step costs does not grow with what has nothing to do with it: the line, the cache, the answers so far.

Counted in Python functions called per step, by a clock that stands still, so that no machine's speed comes in.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from omlxd.engine.engine import Engine
from tests.engine.counting import StepCounter, start_counting, stop_counting
from tests.engine.running import Running, cached, engine, job
from tests.models import scripted

ROWS = 2


def prompt(length: int) -> list[int]:
    return [random.randrange(256) for _ in range(length)]


@asynccontextmanager
async def small_engine(block_size: int = 64) -> AsyncIterator[Engine]:
    """Its model says "A" whatever it is asked: every token takes the same way."""
    model = cached("llama", scripted({}, otherwise=ord("A")), block_size=block_size)
    async with engine(model, clock=lambda: 1.0, max_batch=ROWS, max_queue=3000) as running:
        yield running


async def counted(running: Engine, *, context: int = 20, tokens: int = 40) -> StepCounter:
    """The steps in which all rows decode, from the first token of each to its last."""
    rows = [Running(running, job(prompt(context), tokens, stream=True)) for _ in range(ROWS)]
    for row in rows:
        await row.first_token()
    counter = await start_counting(running)
    for row in rows:
        await row.result()
    await stop_counting(running)
    return counter


async def beside_a_line(waiting: int) -> StepCounter:
    async with small_engine() as running:
        rows = [Running(running, job(prompt(20), 60, stream=True)) for _ in range(ROWS)]
        for row in rows:
            await row.first_token()
        line = [Running(running, job(prompt(20), 1)) for _ in range(waiting)]
        counter = await start_counting(running)
        for row in rows:
            await row.result()
        await stop_counting(running)
        for each in line:
            each.stream.cancel()
        return counter


async def with_blocks(prompts: int) -> StepCounter:
    async with small_engine(block_size=16) as running:
        for _ in range(prompts):
            await Running(running, job(prompt(400), 1)).result()
        return await counted(running)


async def at_length(context: int) -> StepCounter:
    async with small_engine() as running:
        return await counted(running, context=context)


def test_a_steps_cost_is_the_same_however_long_the_line_is() -> None:
    assert asyncio.run(beside_a_line(4)).usual == asyncio.run(beside_a_line(400)).usual


def test_a_steps_cost_is_the_same_however_many_blocks_are_stored() -> None:
    assert asyncio.run(with_blocks(1)).usual == asyncio.run(with_blocks(20)).usual


def test_a_steps_cost_is_the_same_however_long_the_answers_are() -> None:
    assert asyncio.run(at_length(20)).usual == asyncio.run(at_length(3000)).usual
