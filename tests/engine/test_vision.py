"""Answers about pictures are mlx-vlm's own: alone, beside others, from the cache, and in further turns."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.running import Running, engine
from tests.engine.seeing import answers, ask, assert_is_mlx_vlms, cached, chat, loaded, says
from tests.vision_models import FAMILIES, picture

RED, BLUE, WIDE, TALL = picture(1), picture(2), picture(3, (200, 56)), picture(4, (60, 90))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_is_seen_as_mlx_vlm_sees_it(family):
    """Alone, in turns of 16 tokens; the picture is at the start, in the middle, and one of three."""
    model = loaded(family)
    conversations = [
        [says(WIDE, "What is this?")],
        [says("Look at this, please: ", TALL, " What is it?")],
        [says(RED, WIDE, "Which one is wide, ", TALL, "or this one?")],
    ]

    async def main():
        async with engine(model, prefill_chunk=16) as running:
            for turns in conversations:
                assert_is_mlx_vlms(family, turns, await ask(running, model, turns))

    asyncio.run(main())


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_and_without_pictures_share_a_batch(family):
    model = loaded(family)
    conversations = [
        [says("No picture at all.")],
        [says(RED, "What is this?")],
        [says("A longer text without any picture, so that rows differ in length.")],
        [says(WIDE, "and", TALL, "?")],
        [says(BLUE, "What is this?")],
    ]

    async def main():
        async with engine(model, prefill_chunk=24) as running:
            first = Running(running, chat(model, conversations[0], 24, stream=True))
            await first.first_token()
            others = [Running(running, chat(model, turns, 6 + n)) for n, turns in enumerate(conversations[1:])]
            results = await asyncio.gather(*(each.result() for each in [first, *others]))
        for turns, result in zip(conversations, results, strict=True):
            assert_is_mlx_vlms(family, turns, result)

    asyncio.run(main())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_from_the_cache(family):
    """Asked again, then with another turn, then with another picture in that turn."""
    model = cached(family)
    first = [says("See: ", WIDE, "What is this?")]

    async def main():
        async with engine(model, prefill_chunk=16) as running:
            cold = await ask(running, model, first)
            again = await ask(running, model, first)
            further = [*first, answers("It is a thing."), says("And which colour has it got?")]
            second = await ask(running, model, further)
            more = [*further, answers("Grey."), says("And ", TALL, "this one?")]
            third = await ask(running, model, more)
        for turns, result in ((first, cold), (first, again), (further, second), (more, third)):
            assert_is_mlx_vlms(family, turns, result)
        assert cold.usage.cached_tokens == 0
        assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
        assert second.usage.cached_tokens >= cold.usage.prompt_tokens - len("assistant\n")
        assert third.usage.cached_tokens >= second.usage.prompt_tokens - len("assistant\n")

    asyncio.run(main())
