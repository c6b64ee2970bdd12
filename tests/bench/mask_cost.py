"""What a row that is held to a grammar costs the plain rows beside it.

Eight rows, of which none, one or four are held to a schema; they take turns. Timed are the plain rows; beside it, what
the masks took on the host, which is what a step would cost more if all rows waited for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from omlxd.engine.api import GenerateRequest, Json, TextPrompt
from omlxd.engine.engine import Engine
from omlxd.engine.inbox import Close
from omlxd.engine.model import LoadedModel, ModelFacts
from omlxd.engine.preparing import Preparer
from omlxd.engine.scheduler import SchedulerLimits
from omlxd.engine.steering import Course
from tests.bench.bench_model import SIZE, fresh
from tests.bench.figures import Figure, Plan
from tests.engine.running import Running, job, tokenizer
from tests.models import IM_END, build

ROWS, TOKENS, WIDTH = 8, 48, 8192
ITEM: dict[str, Json] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
SCHEMA: dict[str, Json] = {"type": "array", "minItems": 1000, "items": ITEM}  # no answer gets to its end


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    model, course = _loaded()
    engine = Engine(model, SchedulerLimits())
    del model
    steps: dict[int, list[float]] = {held: [] for held in (0, 1, 4)}
    masks: dict[int, list[float]] = {held: [] for held in steps}
    for _ in range(1 + plan.repeats(7)):
        for held in steps:
            step_ms, mask_ms = await _steps(engine, course, held)
            steps[held].append(step_ms)
            masks[held].append(mask_ms)
    engine.close(Close("unloaded"))
    await engine.closed
    for held in (1, 4):
        title = f"a step of the plain rows, {held} of {ROWS} held to a schema"
        plain = steps[0][1:]
        yield Figure(f"masks.step_{held}", title, "ms", "lower", steps[held][1:], "none held", plain)
        yield Figure(f"masks.host_{held}", f"masks per step, {held} held", "ms", "lower", masks[held][1:])


def _loaded() -> tuple[LoadedModel, Course]:
    llama = build("llama", context=4096, vocab_size=WIDTH, **SIZE)
    facts = ModelFacts("bench", Path("/"), None, WIDTH, frozenset({IM_END}), True, 0)
    request = GenerateRequest("bench", TextPrompt("x"), response_format={"type": "json_schema", "schema": SCHEMA})
    course = Preparer(tokenizer(), facts).prepare(request).course
    assert course is not None
    return LoadedModel(llama, tokenizer(), facts), course


async def _steps(engine: Engine, course: Course, held: int) -> tuple[float, float]:
    """Milliseconds per step of the plain rows, and per step of all masks."""
    jobs = [job(fresh(16), TOKENS, use_cache=False) for _ in range(ROWS)]
    rows = [Running(engine, replace(each, course=course) if n < held else each) for n, each in enumerate(jobs)]
    results = [await row.result() for row in rows]
    step_ms = min(result.timings.decode_ms / (TOKENS - 1) for result in results[held:])
    return step_ms, sum(result.timings.mask_ms for result in results) / TOKENS
