"""Tokens a second: decoding at several batch sizes, and prefill, each against the bare `BatchGenerator` loop.

Whoever streams from another thread wakes that thread at each step. What this alone costs, with nothing to do once it
is awake, is measured beside.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from tests.bench.bench_model import bare_decode, bare_ttft_ms, decode, engine_on, fresh, llama, ttft_ms
from tests.bench.figures import Figure, Plan

BATCHES = (1, 4, 16, 32)
BARE = "bare BatchGenerator loop"
PROMPT_TOKENS = 2048


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    async with engine_on(llama()) as engine:
        for rows in BATCHES:
            tokens, bare, handed, whole, stream = (64 if plan.quick else 160), [], [], [], []
            prompts = [fresh(16) for _ in range(rows)]
            for _ in range(1 + plan.repeats(10)):
                bare.append(await asyncio.to_thread(bare_decode, llama(), prompts, tokens))
                handed.append(await asyncio.to_thread(bare_decode, llama(), prompts, tokens, _hand_over()))
                whole.append(await decode(engine, prompts, tokens, stream=False))
                stream.append(await decode(engine, prompts, tokens, stream=True))
            for name, samples, words in (("whole", whole, "answered whole"), ("stream", stream, "streamed")):
                title = f"decode, batch {rows}, {words}"
                yield Figure(
                    f"decode.{name}_{rows}", title, "tokens/s", "higher", samples[1:], BARE, bare[1:], target=0.97
                )
            title = f"decode, batch {rows}, the bare loop that wakes an event loop at each step"
            yield Figure(f"decode.handed_{rows}", title, "tokens/s", "higher", handed[1:], BARE, bare[1:])
        bare, ours = [], []
        for _ in range(1 + plan.repeats(6)):
            bare.append(PROMPT_TOKENS / await asyncio.to_thread(bare_ttft_ms, llama(), fresh(PROMPT_TOKENS)) * 1e3)
            ours.append(PROMPT_TOKENS / await ttft_ms(engine, fresh(PROMPT_TOKENS)) * 1e3)
        yield Figure(
            "prefill.rate", f"prefill of {PROMPT_TOKENS} tokens", "tokens/s", "higher", ours[1:], BARE, bare[1:]
        )


def _hand_over() -> Callable[[object], object]:
    """Hands things over to this event loop, where nobody looks at them."""
    loop = asyncio.get_running_loop()
    return lambda step: loop.call_soon_threadsafe(_drop, step)


def _drop(_: object) -> None:
    """Nobody looks."""
