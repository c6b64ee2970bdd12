"""The guard: the same answer on every path, and refusals with the numbers they were made from."""

from __future__ import annotations

import pytest

from omlxd.engine.guard import Helpers, MemoryGuard
from omlxd.engine.limits import Ceilings, Level, MemoryLimits, Orders, judge

MB = 10**6


def limits(soft: int, *, measured: int = 0, ledger: int = 0, exhausted: bool = False) -> MemoryLimits:
    """Limits with a soft mark of `soft` bytes."""
    limit = -(-soft * 10 // 9)
    return judge(
        Ceilings(limit, limit),
        tier="custom",
        measured=measured,
        ledger=ledger,
        before=Level.OK,
        orders=Orders(exhausted=exhausted),
    )


def guard_with_hot_cache() -> MemoryGuard:
    """MM-01: a limit of 1000 MB and a footprint of 600, of which the hot tier has 300."""
    guard = MemoryGuard()
    guard.ledger.hold("m", "weights", 300 * MB)
    guard.ledger.watch("hot tier", "hot", lambda: 300 * MB)
    guard.limits = limits(1000 * MB, measured=600 * MB, ledger=600 * MB)
    return guard


@pytest.mark.parametrize("kind", ["kv", "chunk", "weights"])
def test_the_hot_tier_is_counted_once_on_every_path(kind: str) -> None:
    guard = guard_with_hot_cache()
    assert guard.reserve("m", kind, 450 * MB) is None  # type: ignore[arg-type]
    assert guard.reserve("m", kind, 150 * MB) is not None  # type: ignore[arg-type]
    assert guard.usage == 750 * MB


def test_a_refusal_has_the_numbers_of_its_rule() -> None:
    guard = guard_with_hot_cache()
    error = guard.gave_up("the request", 450 * MB, advice="wait")
    assert error.fields == {
        "needed_bytes": 450 * MB,
        "limit_bytes": 400 * MB,
        "binding": "static",
        "advice": "wait",
    }


def test_what_could_never_fit_beside_the_process_and_what_stays_is_refused_at_once() -> None:
    guard = MemoryGuard(limits=limits(1000))
    guard.set_process_bytes(100)
    guard.ledger.hold("own", "weights", 200)
    guard.ledger.hold("idle", "weights", 300)
    assert guard.refusal("it", 700, advice="", staying=["own"]) is None
    refused = guard.refusal("it", 701, advice="less", staying=["own"])
    assert refused is not None
    assert (refused.fields["needed_bytes"], refused.fields["limit_bytes"]) == (701, 700)
    guard.pinned = frozenset({"idle"})
    assert guard.refusal("it", 401, advice="", staying=["own"]) is not None
    assert guard.refusal("it", 400, advice="", staying=["own"]) is None


def test_a_ceiling_that_jumps_refuses_nothing_for_good() -> None:
    guard = MemoryGuard(limits=judge(Ceilings(1000, 10), tier="safe", measured=0, ledger=0, before=Level.OK))
    assert guard.refusal("it", 800, advice="") is None
    assert guard.reserve("m", "kv", 800) is None


def test_where_nothing_more_can_be_freed_the_hard_mark_admits() -> None:
    guard = MemoryGuard(limits=limits(900, measured=880))
    assert guard.reserve("m", "kv", 50) is None
    guard.limits = limits(900, measured=880, exhausted=True)
    assert guard.reserve("m", "kv", 50) is not None


def test_work_that_waits_has_the_cache_shrunk_by_what_is_missing_and_then_an_idle_model_unloaded() -> None:
    asked: list[object] = []
    guard = MemoryGuard(limits=limits(900, measured=800))
    guard.helped_by(Helpers(shrink_cache=asked.append, unload_idle=lambda: asked.append("unload")))
    guard.want_room(150)
    assert asked == [50, "unload"]
    guard.want_room(100)
    assert asked == [50, "unload"]


def test_a_cache_that_gives_enough_spares_the_models() -> None:
    hot, unloaded = [300], []
    guard = MemoryGuard(limits=limits(900, measured=800, ledger=800))
    guard.ledger.hold("m", "weights", 500)
    guard.ledger.watch("hot tier", "hot", lambda: hot[0])

    def shrink(nbytes: int) -> None:
        hot[0] -= nbytes

    guard.helped_by(Helpers(shrink_cache=shrink, unload_idle=lambda: unloaded.append(1)))
    guard.want_room(150)
    assert (hot, unloaded) == ([250], [])


def test_the_process_is_one_named_entry_however_often_it_is_measured() -> None:
    guard = MemoryGuard()
    guard.set_process_bytes(50)
    guard.set_process_bytes(200)
    assert [(entry.owner, entry.kind, entry.bytes) for entry in guard.ledger.entries()] == [("omlxd", "process", 200)]
