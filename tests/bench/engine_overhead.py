"""What an engine's steps cost over mlx-lm's bare `BatchGenerator` loop, as ratios of one run.

    .venv/bin/python -m tests.bench.engine_overhead [--tokens 128] [--repeats 5]

A tiny llama of hidden 256 and 8 layers, prompts of 16 tokens, greedy, batch 1, 4 and 16. Engine and bare loop take
turns; each figure is the median of its repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator

from omlxd.engine.engine import Engine
from omlxd.engine.inbox import Close
from omlxd.engine.model import LoadedModel, ModelFacts
from omlxd.engine.scheduler import SchedulerLimits
from tests.engine.running import Running, job, tokenizer
from tests.models import VOCABULARY, build


def model() -> nn.Module:
    """The benchmark's llama: large enough that a step is arithmetic, small enough for a CPU."""
    return build("llama", hidden_size=256, num_hidden_layers=8, intermediate_size=768, context=4096)


def prompts(rows: int, length: int = 16) -> list[list[int]]:
    return [[(7 * row + position) % 256 for position in range(length)] for row in range(rows)]


def bare(llama: nn.Module, rows: int, tokens: int) -> float:
    """Tokens per second of the bare loop, first token to last."""
    generator = BatchGenerator(llama, max_tokens=tokens)
    generator.insert(prompts(rows))
    began, produced = 0.0, 0
    while responses := generator.next_generated():
        if not began:
            began = time.perf_counter()
        produced += len(responses)
    generator.close()
    return (produced - rows) / (time.perf_counter() - began)


async def through_engine(engine: Engine, rows: int, tokens: int, *, stream: bool) -> float:
    running = [Running(engine, job(prompt, tokens, stream=stream)) for prompt in prompts(rows)]
    readers = [asyncio.ensure_future(each.events()) for each in running] if stream else []
    results = [await each.result() for each in running]
    await asyncio.gather(*readers)
    return sum((tokens - 1) / (result.timings.decode_ms / 1e3) for result in results)


async def measure(llama: nn.Module, rows: int, tokens: int, repeats: int) -> Sequence[float]:
    facts = ModelFacts("bench", Path("/"), None, VOCABULARY, frozenset(), True, 0)
    engine = Engine(LoadedModel(llama, tokenizer(), facts), SchedulerLimits())
    await through_engine(engine, rows, 8, stream=False)
    bare(llama, rows, 8)
    figures: dict[str, list[float]] = {"bare": [], "whole": [], "stream": []}
    for _ in range(repeats):
        figures["bare"].append(await asyncio.to_thread(bare, llama, rows, tokens))
        figures["whole"].append(await through_engine(engine, rows, tokens, stream=False))
        figures["stream"].append(await through_engine(engine, rows, tokens, stream=True))
    engine.close(Close("shutdown"))
    await engine.closed
    return [statistics.median(figures[name]) for name in ("bare", "whole", "stream")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    llama = model()
    print("batch  bare tok/s  engine/bare  streaming engine/bare")
    for rows in (1, 4, 16):
        alone, whole, stream = asyncio.run(measure(llama, rows, options.tokens, options.repeats))
        print(f"{rows:5}  {alone:10.1f}  {whole / alone:11.3f}  {stream / alone:21.3f}")


if __name__ == "__main__":
    main()
