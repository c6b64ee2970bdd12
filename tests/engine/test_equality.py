"""Batched, chunked and joined answers are the cold single run's, for every cache layout."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.engine.running import Running, assert_is_the_cold_run, engine, job, loaded
from tests.models import MODELS, VOCABULARY


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, length).tolist() for length in lengths]


@pytest.mark.parametrize("name", MODELS)
def test_requests_of_one_batch_each_get_their_cold_answer(name: str) -> None:
    """Prompts shorter and longer than the window of 16 and than a turn of 24 tokens, arriving at different times."""
    model = loaded(name)

    async def main() -> None:
        async with engine(model, prefill_chunk=24, max_batch=4) as running:
            first = [Running(running, job(p, 12, logprobs=20)) for p in prompts(1, [3, 40, 1])]
            streaming = Running(running, job(prompts(2, [17])[0], 20, logprobs=20, stream=True))
            await streaming.first_token()
            later = [Running(running, job(p, 9, logprobs=20)) for p in prompts(3, [61, 2, 23, 30])]
            results = await asyncio.gather(*(r.result() for r in [*first, streaming, *later]))
        for result in results:
            assert_is_the_cold_run(model.model, result)

    asyncio.run(main())
