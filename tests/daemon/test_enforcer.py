"""The enforcer: every rung of the ladder, every mark crossed both ways, and readings that lag, jump and lie."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.daemon.enforcer import BUSY_S, EMPTY_S, IDLE_S, PRESSED_S, TRAIL_S, EnforcerThread
from omlxd.engine.limits import Level, MemoryPolicy, Orders
from tests.daemon.memory_fakes import Bench, FakeMachine


def test_a_quiet_machine_is_left_alone() -> None:
    bench = Bench(hot=300)
    assert bench.poll(500, 600, 700, 899) is Level.OK
    assert bench.relief.done == []
    assert bench.events == []
    assert bench.guard.limits.orders == Orders()


def test_the_ladder_is_climbed_mildest_first_one_step_per_poll() -> None:
    bench = Bench(FakeMachine(pool=100), hot=1, idle=[1], low=[1], prefills=[1])
    seen = []
    for _ in range(9):
        bench.poll(1500)
        seen.append((bench.guard.limits.orders, list(bench.relief.done)))
    assert [orders.chunk_share for orders, _ in seen[:3]] == [0.5, 0.25, 0.25]
    assert [orders.admits for orders, _ in seen[:4]] == [True, True, False, False]
    assert [done[-1] for _, done in seen[3:8]] == ["hot", "pool", "unload", "preempt", "fail"]
    assert [len(done) for _, done in seen] == [0, 0, 0, 1, 2, 3, 4, 5, 5]
    assert [orders.exhausted for orders, _ in seen] == [False] * 8 + [True]


def test_every_step_is_an_event_with_its_reason() -> None:
    bench = Bench(hot=50)
    bench.poll(1500, 1500, 1500, 1500, 1450)
    assert [action.what for action, _ in bench.events] == [
        "level HARD",
        "prefill turns are 50% of their size",
        "prefill turns are 25% of their size",
        "no request is admitted",
        "hot",
    ]
    last = bench.events[-1][0]
    assert (last.bytes, last.why) == (50, "1500 bytes used, static limit, marks at 900 and 960")
    assert list(bench.enforcer.actions) == [action for action, _ in bench.events]


def test_below_the_hard_mark_nothing_is_taken_from_a_request() -> None:
    bench = Bench(low=[10], prefills=[10])
    bench.poll(*[950] * 10)
    assert bench.relief.done == []
    assert bench.guard.limits.orders.exhausted


def test_a_prompt_is_ended_only_above_the_abort_mark() -> None:
    bench = Bench(prefills=[10])
    bench.poll(*[979] * 10)
    assert bench.relief.done == []
    bench.poll(981)
    assert bench.relief.done == ["fail"]


def test_other_programs_hunger_ends_no_prompt() -> None:
    """The dynamic ceiling is low, and the abort mark leaves it out."""
    machine = FakeMachine(free=10)
    bench = Bench(machine, prefills=[10])
    bench.poll(*[500] * 10)
    assert bench.guard.limits.binding == "dynamic"
    assert bench.guard.limits.level is Level.HARD
    assert bench.relief.done == []


def test_when_the_pressure_has_passed_everything_is_as_before() -> None:
    bench = Bench()
    bench.poll(*[980] * 6)
    assert not bench.guard.limits.orders.admits
    assert bench.poll(930) is Level.HARD
    assert bench.poll(900) is Level.SOFT
    assert bench.poll(860) is Level.SOFT
    assert not bench.guard.limits.orders.admits
    assert bench.poll(850) is Level.OK
    assert bench.guard.limits.orders == Orders()


def test_steps_stop_as_soon_as_the_level_has_fallen() -> None:
    bench = Bench(hot=400, idle=[100, 100])
    bench.poll(950, 950, 950)
    while bench.guard.limits.level is not Level.OK:
        bench.poll()
    assert bench.relief.done == ["hot"]
    assert bench.machine.held <= 850


# -- readings that lag, jump and lie ----------------------------------------------------------------------------------


def test_a_footprint_that_falls_half_a_second_late_costs_nobody_anything() -> None:
    """MM-03: 980 980 700 700 at 0, 0.1, 0.25 and 0.5 s after MLX's pool was returned; the limit is 900."""
    readings = [980]
    machine = FakeMachine(held=700, pool=280, shown=lambda real: readings[0])
    bench = Bench(machine, idle=[1], low=[1], prefills=[1])
    bench.enforcer.set_policy(MemoryPolicy("custom", 900))
    bench.poll()
    machine.return_pool()  # by a request that ended, not by the ladder
    for reading, pause_s in ((980, 0.1), (980, 0.15), (700, 0.25), (700, 0.25)):
        readings[0] = reading
        assert bench.poll(every=pause_s) is Level.OK
    assert bench.relief.done == []
    assert bench.events == []


def test_what_the_ladder_has_freed_is_credited_until_it_shows() -> None:
    readings = [980]
    bench = Bench(FakeMachine(shown=lambda real: readings[0]), hot=500, idle=[1], low=[1], prefills=[1])
    bench.poll(980, 980, 980, 980)
    assert bench.relief.done == ["hot"]
    for readings[0] in (980, 980, 900, 845, 845):
        assert bench.poll(845) is Level.OK
    assert bench.relief.done == ["hot"]


def test_bytes_that_never_come_back_are_credited_for_the_longest_delay_and_no_longer() -> None:
    """The footprint lies: whatever is freed, it says 990."""
    bench = Bench(FakeMachine(shown=lambda real: 990), hot=500, idle=[100])
    bench.poll(*[990] * 4)
    assert bench.relief.done == ["hot"]
    assert bench.poll(every=TRAIL_S) is Level.OK
    assert bench.poll() is Level.HARD
    bench.poll(*[990] * 3)
    assert bench.relief.done == ["hot", "hot"]


def test_a_step_that_takes_time_is_waited_for_and_not_taken_twice() -> None:
    machine = FakeMachine()
    bench = Bench(machine, idle=[300, 300], slow=True)
    weights = bench.hold("weights", 980)
    bench.poll(*[980] * 4)
    assert bench.relief.done == ["unload"]
    bench.poll(980, 980, 980)
    assert bench.relief.done == ["unload"]
    weights.resize(680)
    assert bench.poll(680) is Level.OK
    assert bench.relief.done == ["unload"]


def test_a_step_that_never_ends_holds_the_ladder_up_for_so_long_only() -> None:
    bench = Bench(FakeMachine(), idle=[300, 300], slow=True)
    bench.hold("weights", 980)
    bench.poll(*[980] * 4)
    bench.poll(*[980] * 17)
    assert bench.relief.done == ["unload", "unload"]


def test_one_high_reading_does_no_more_than_the_mildest_step() -> None:
    bench = Bench(hot=500, idle=[100], low=[100], prefills=[100])
    bench.poll(600, 1500, 600)
    assert bench.relief.done == []
    assert bench.guard.limits.orders == Orders()


def test_a_footprint_of_nothing_hides_no_reservation() -> None:
    bench = Bench(FakeMachine(shown=lambda real: 0))
    bench.hold("kv", 950)
    assert bench.poll() is Level.SOFT


@given(st.lists(st.integers(0, 2000), max_size=60), st.integers(0, 3000), st.lists(st.integers(1, 400), max_size=4))
def test_any_readings_lose_no_state_and_end_in_peace(readings: list[int], hot: int, idle: list[int]) -> None:
    bench = Bench(hot=hot, idle=idle, low=[50, 50], prefills=[50])
    for held in readings:
        before = len(bench.relief.done)
        bench.poll(held)
        assert len(bench.relief.done) <= before + 1
        limits = bench.guard.limits
        assert limits.level is not Level.OK or limits.orders == Orders()
    bench.machine.now += TRAIL_S
    bench.poll(100)
    assert bench.guard.limits.level is Level.OK
    assert bench.guard.limits.orders == Orders()


# -- ceilings ---------------------------------------------------------------------------------------------------------


def test_the_gpus_limit_binds_where_it_is_lowest() -> None:
    bench = Bench(FakeMachine(metal=500))
    bench.poll(100)
    assert (bench.guard.limits.binding, bench.guard.limits.soft) == ("metal", 450)


def test_a_limit_of_the_gpu_that_somebody_sets_is_in_force_at_the_next_poll() -> None:
    """Also before MLX is there, and in the place of what MLX read when it began."""
    machine = FakeMachine(metal=None, gpu=500)
    bench = Bench(machine)
    bench.poll(100)
    assert bench.guard.limits.ceilings.metal == 500
    machine.metal, machine.gpu = 500, 800
    bench.poll(100)
    assert bench.guard.limits.ceilings.metal == 800
    machine.gpu = None
    bench.poll(100)
    assert bench.guard.limits.ceilings.metal == 500


@pytest.mark.parametrize(("pressure", "dynamic"), [("normal", 700), ("warn", 500), ("critical", 300)])
def test_what_is_free_counts_less_under_pressure_from_outside(pressure: str, dynamic: int) -> None:
    bench = Bench(FakeMachine(free=400, pressed=pressure))  # type: ignore[arg-type]
    bench.poll(300)
    assert bench.guard.limits.ceilings.dynamic == dynamic


def test_a_limit_that_is_set_below_the_use_starts_the_ladder() -> None:
    bench = Bench(hot=400)
    assert bench.poll(700) is Level.OK
    bench.enforcer.set_policy(MemoryPolicy("custom", 500))
    assert bench.poll() is Level.HARD
    for _ in range(6):
        bench.poll()
    assert bench.relief.done[:1] == ["hot"]
    bench.enforcer.set_policy(MemoryPolicy("aggressive"))
    bench.machine.free = 10_000
    assert bench.poll() is Level.OK


def test_a_new_limit_holds_before_the_next_poll() -> None:
    bench = Bench()
    bench.poll(100)
    bench.enforcer.set_policy(MemoryPolicy("custom", 500))
    assert bench.guard.limits.ceilings.static == 500


def test_a_limit_that_is_set_while_a_poll_judges_outlives_that_poll() -> None:
    class Meanwhile(FakeMachine):
        def working_set(self) -> int | None:
            """The last reading that a poll takes."""
            if armed:
                armed.clear()
                bench.enforcer.set_policy(MemoryPolicy("custom", 500))
            return None

    armed: list[bool] = []
    bench = Bench(Meanwhile())
    armed.append(True)
    bench.poll(100)
    assert bench.guard.limits.ceilings.static == 500


# -- how often --------------------------------------------------------------------------------------------------------


def test_it_looks_often_when_something_runs_and_rarely_when_nothing_does() -> None:
    bench = Bench()
    assert bench.enforcer.poll() == EMPTY_S
    bench.hold("weights", 100)
    assert bench.enforcer.poll() == IDLE_S
    running = bench.hold("kv", 100)
    assert bench.enforcer.poll() == BUSY_S
    running.resize(800)
    assert bench.enforcer.poll() == BUSY_S  # a reading of the ledger: 900
    running.resize(900)
    assert bench.enforcer.poll() == PRESSED_S


def test_a_load_is_polled_as_work() -> None:
    bench = Bench()
    bench.hold("load", 1)
    assert bench.enforcer.poll() == BUSY_S


def test_the_thread_polls_at_once_when_woken_and_ends_when_told() -> None:
    polled = threading.Semaphore(0)

    def poll() -> float:
        polled.release()
        return 3600

    thread = EnforcerThread(poll)
    thread.start()
    assert polled.acquire(timeout=10)
    thread.wake()
    assert polled.acquire(timeout=10)
    thread.stop()
    thread.wake()
    assert not polled.acquire(blocking=False)


def test_a_reading_that_fails_is_not_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    polled = threading.Semaphore(0)

    def poll() -> float:
        polled.release()
        raise OSError("no such reading")

    thread = EnforcerThread(poll)
    thread.start()
    assert polled.acquire(timeout=10)
    thread.wake()
    assert polled.acquire(timeout=10)
    thread.stop()
    assert "no such reading" in caplog.text
