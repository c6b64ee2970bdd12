"""The idle clock: what counts as idle, and when the limit is reached."""

from __future__ import annotations

import math

import anyio
import pytest

from omlxd.daemon.idle import IdleClock


class World:
    """What has happened, and the time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.quiet_since: float | None = 1000.0

    def clock(self, limit_s: float) -> IdleClock:
        return IdleClock(lambda: self.quiet_since, limit_s, lambda: self.now)


@pytest.fixture
def world() -> World:
    return World()


def test_without_a_limit_there_is_no_end(world: World) -> None:
    assert world.clock(0).left_s() == math.inf


def test_the_limit_counts_from_the_last_thing_that_happened(world: World) -> None:
    clock = world.clock(60)
    world.now += 50
    assert clock.left_s() == 10
    world.quiet_since = world.now
    assert clock.left_s() == 60
    world.now += 61
    assert clock.left_s() == -1


def test_while_something_happens_the_whole_limit_is_left(world: World) -> None:
    world.quiet_since = None
    world.now += 1e6
    assert world.clock(60).left_s() == 60


def test_a_new_limit_wakes_who_waits_for_the_old_one(world: World) -> None:
    async def wait() -> None:
        clock = world.clock(0)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(clock.wait)
                await anyio.wait_all_tasks_blocked()
                world.now += 5
                clock.set_limit(5)

    anyio.run(wait)
