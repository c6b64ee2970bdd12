"""Counts the Python functions that an engine's thread calls in each step: a cost that no machine's mood changes.

The count begins and ends on the engine thread itself, between two steps, by a question to its prefix cache.
"""

from __future__ import annotations

import statistics
import sys
from types import FrameType
from typing import Any

from omlxd.cache.prefix import PrefixCache
from omlxd.engine.engine import Engine
from omlxd.engine.worker import Worker

STEP = Worker.run.__code__, "_step"  # a step begins where the thread's loop calls this


class StepCounter:
    """How many functions each step called, in order; the first and the last step, counted in part, are left out."""

    def __init__(self) -> None:
        self._steps: list[int] = []

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call":
            return
        caller = frame.f_back
        if frame.f_code.co_name == STEP[1] and caller is not None and caller.f_code is STEP[0]:
            self._steps.append(0)
        if self._steps:
            self._steps[-1] += 1

    @property
    def steps(self) -> list[int]:
        return self._steps[:-1]

    @property
    def usual(self) -> float:
        """Of a step in which nothing happens but a token for each row."""
        return statistics.median(self.steps)


async def start_counting(engine: Engine) -> StepCounter:
    counter = StepCounter()

    def begin(_: PrefixCache) -> None:
        sys.setprofile(counter)

    await engine.ask_cache(begin)
    return counter


async def stop_counting(engine: Engine) -> None:
    def end(_: PrefixCache) -> None:
        sys.setprofile(None)

    await engine.ask_cache(end)
