"""What a row that is held to a grammar costs the rows beside it, as milliseconds per step of one run.

    .venv/bin/python -m tests.bench.mask_cost [--tokens 48] [--repeats 7] [--vocabulary 8192]

A llama of hidden 256 and 8 layers, eight rows, of which none, one or four are held to a schema; they take turns and
the least of the repeats counts. Timed are the plain rows; beside it, what the masks took on the host, and what a step
would cost if all rows waited for them.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

from omlxd.engine.api import GenerateRequest, TextPrompt
from omlxd.engine.engine import Engine
from omlxd.engine.inbox import Close
from omlxd.engine.model import LoadedModel, ModelFacts
from omlxd.engine.preparing import Preparer
from omlxd.engine.scheduler import SchedulerLimits
from omlxd.engine.steering import Course
from tests.engine.running import Running, job, tokenizer
from tests.models import IM_END, build

ROWS = 8
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
SCHEMA = {"type": "array", "minItems": 1000, "items": ITEM}  # no answer gets to its end


def loaded(vocabulary: int) -> tuple[LoadedModel, Course]:
    llama = build(
        "llama", hidden_size=256, num_hidden_layers=8, intermediate_size=768, context=4096, vocab_size=vocabulary
    )
    facts = ModelFacts("bench", Path("/"), None, vocabulary, frozenset({IM_END}), True, 0)
    request = GenerateRequest("bench", TextPrompt("x"), response_format={"type": "json_schema", "schema": SCHEMA})
    course = Preparer(tokenizer(), facts).prepare(request).course
    assert course is not None
    return LoadedModel(llama, tokenizer(), facts), course


async def steps(engine: Engine, course: Course, held: int, tokens: int) -> tuple[float, float]:
    """Milliseconds per step of the plain rows, and per token of the held ones' masks."""
    prompts = [[(7 * row + position) % 256 for position in range(16)] for row in range(ROWS)]
    jobs = [job(prompt, tokens, use_cache=False) for prompt in prompts]
    rows = [Running(engine, replace(each, course=course) if n < held else each) for n, each in enumerate(jobs)]
    results = [await row.result() for row in rows]
    step_ms = min(result.timings.decode_ms / (tokens - 1) for result in results[held:])
    return step_ms, sum(result.timings.mask_ms for result in results) / tokens


async def main(tokens: int, repeats: int, vocabulary: int) -> None:
    model, course = loaded(vocabulary)
    engine = Engine(model, SchedulerLimits())
    del model
    least = {held: (float("inf"), 0.0) for held in (0, 1, 4)}
    for _ in range(repeats + 1):  # the first round warms up
        for held in least:
            least[held] = min(least[held], await steps(engine, course, held, tokens))
    plain = least[0][0]
    for held, (step_ms, mask_ms) in least.items():
        print(
            f"{held} of {ROWS} rows held: {step_ms:.2f} ms a step ({step_ms / plain:.3f} of plain), "
            f"masks {mask_ms:.2f} ms of each ({1 + mask_ms / plain:.3f} of plain if all waited for them)"
        )
    engine.close(Close("unloaded"))
    await engine.closed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, default=8192)
    given = parser.parse_args()
    asyncio.run(main(given.tokens, given.repeats, given.vocabulary))
