"""The measures, by name: each is an async generator of figures in a module of its own, run in a process of its own.

The table holds module names, so that the runner can list measures without loading mlx. `python -m tests.bench.measures
NAME` runs one and prints its figures, one JSON text a line.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
from collections.abc import AsyncIterator, Callable

from tests.bench.figures import Figure, Plan, to_json

Measure = Callable[[Plan], AsyncIterator[Figure]]

# In the order in which they run and appear: what each module measures, as the report's heading.
MEASURES = {
    "throughput": "Tokens per second",
    "first_token": "Time to the first token",
    "latency": "Beside other clients",
    "caching": "The cache in memory",
    "on_disk": "The cache on SSD",
    "wire": "The socket",
    "loading": "Loading and changing models",
    "starting": "Starting up",
    "idle": "Doing nothing",
    "python_cost": "Python per token and row",
    "mask_cost": "Answers held to a grammar",
    "growth_engine": "Growth: queue and sequence",
    "growth_cache": "Growth: prompts, blocks and sessions",
}


def load(name: str) -> Measure:
    measure: Measure = importlib.import_module(f"tests.bench.{name}").measure
    return measure


async def _print(name: str, plan: Plan) -> None:
    async for figure in load(name)(plan):
        print(json.dumps(to_json(figure)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MEASURES)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    asyncio.run(_print(given.name, Plan(quick=given.quick)))
    os._exit(0)  # the bare loop's threads keep mlx streams, whose end at exit sometimes aborts the process
