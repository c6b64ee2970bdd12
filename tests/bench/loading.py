"""Models that come and go: loading one, and two that take turns, both at home and each in the other's place."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from tests.bench.figures import Figure, Plan
from tests.bench.living import home_with, spawn
from tests.e2e.living import Daemon

# argv: a model folder. Prints the milliseconds that mlx-lm takes to load it, imports not counted.
BARE = (
    "import sys, time; import mlx.core as mx; from mlx_lm.utils import load; began = time.perf_counter(); "
    "model, _ = load(sys.argv[1]); mx.eval(model.parameters()); print((time.perf_counter() - began) * 1e3)"
)


async def measure(plan: Plan) -> AsyncIterator[Figure]:
    with home_with("one", "two") as daemon:
        spawn(daemon)
        daemon.call("models.load", model="one")  # the first load brings mlx and mlx-lm with it
        daemon.call("models.unload", model="one")
        ours, bare = [], []
        for _ in range(plan.repeats(7)):
            command = [sys.executable, "-c", BARE, str(daemon.models / "one")]
            bare.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            ours.append(_ms(daemon, "models.load", model="one"))
            daemon.call("models.unload", model="one")
        yield Figure("load", "loading a model", "ms", "lower", ours, "mlx_lm.load in a process of its own", bare)
        same, turns, places = [], [], []
        for name in ("one", "two"):
            _first_token(daemon, name)
        for _ in range(plan.repeats(9)):
            same.append(_first_token(daemon, "two"))
            turns += [_first_token(daemon, name) for name in ("one", "two")]
        yield Figure(
            "alternate.loaded", "first token, two loaded models in turns", "ms", "lower", turns, "one model", same
        )
        for _ in range(plan.repeats(5)):
            for name, other in (("one", "two"), ("two", "one")):
                daemon.call("models.unload", model=other)
                places.append(_first_token(daemon, name))
        yield Figure(
            "alternate.in_place",
            "first token, each in the other's place",
            "ms",
            "lower",
            places,
            "one model",
            same,
        )


def _first_token(daemon: Daemon, model: str) -> float:
    return _ms(daemon, "generate.complete", model=model, prompt="x", max_tokens=1, ignore_eos=True, cache=False)


def _ms(daemon: Daemon, method: str, **params: Any) -> float:
    began = time.perf_counter()
    daemon.call(method, **params)
    return (time.perf_counter() - began) * 1e3
