"""The ledger: reservations come and go, add up, and two threads never share room."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.engine.api import InvariantError
from omlxd.engine.ledger import Ledger, LedgerEntry, Reservation


def test_entries_are_summed_by_owner_and_kind_largest_first() -> None:
    ledger = Ledger()
    ledger.hold("a", "kv", 10)
    ledger.hold("a", "kv", 20)
    ledger.hold("a", "weights", 100)
    ledger.hold("b", "kv", 0)
    assert ledger.entries() == [LedgerEntry("a", "weights", 100), LedgerEntry("a", "kv", 30)]
    assert ledger.total() == 130


def test_a_release_gives_back_once() -> None:
    ledger = Ledger()
    held = ledger.hold("a", "kv", 10)
    ledger.hold("b", "kv", 5)
    held.release()
    held.release()
    held.resize(1000)
    assert ledger.total() == 5


def test_a_reservation_may_grow_and_shrink() -> None:
    ledger = Ledger()
    held = ledger.hold("a", "kv", 10)
    held.resize(25)
    assert ledger.total() == 25
    held.resize(5)
    assert ledger.total() == 5


def test_what_does_not_fit_is_not_reserved() -> None:
    ledger = Ledger()
    assert ledger.reserve("a", "kv", 60, lambda total: total <= 100) is not None
    assert ledger.reserve("b", "kv", 60, lambda total: total <= 100) is None
    assert ledger.total() == 60


def test_holders_that_count_for_themselves_count_in_totals_and_in_what_fits() -> None:
    ledger = Ledger()
    hot = [50]
    ledger.watch("hot tier", "hot", lambda: hot[0])
    assert ledger.total() == 50
    assert ledger.reserve("a", "kv", 60, lambda total: total <= 100) is None
    hot[0] = 30
    assert ledger.reserve("a", "kv", 60, lambda total: total <= 100) is not None
    assert ledger.entries() == [LedgerEntry("a", "kv", 60), LedgerEntry("hot tier", "hot", 30)]


def test_kinds_can_be_asked_for_without_some_owners() -> None:
    ledger = Ledger()
    ledger.hold("a", "weights", 10)
    ledger.hold("b", "weights", 20)
    ledger.hold("b", "kv", 40)
    assert ledger.held(["weights"]) == 30
    assert ledger.held(["weights", "kv"], but=["a"]) == 60


def test_many_threads_never_reserve_more_than_there_is() -> None:
    ledger = Ledger()
    most: list[int] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait(10)
        for _ in range(500):
            got = ledger.reserve("a", "kv", 7, lambda total: total <= 50)
            most.append(ledger.total())
            if got is not None:
                got.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert max(most) <= 50
    assert ledger.total() == 0
    ledger.check()


def test_books_that_do_not_add_up_are_loud() -> None:
    ledger = Ledger()
    held = ledger.hold("a", "kv", 10)
    held.nbytes = 11  # behind the ledger's back
    with pytest.raises(InvariantError, match="11 bytes, it counts 10"):
        ledger.check()


@given(st.lists(st.tuples(st.sampled_from(["hold", "resize", "release"]), st.integers(0, 9), st.integers(0, 100))))
def test_after_any_history_the_total_is_that_of_what_is_held(steps: list[tuple[str, int, int]]) -> None:
    ledger = Ledger()
    held: list[Reservation] = []
    sizes: dict[int, int] = {}
    for what, index, nbytes in steps:
        if what == "hold":
            held.append(ledger.hold("a", "kv", nbytes))
            sizes[len(held) - 1] = nbytes
        elif index < len(held) and what == "resize":
            held[index].resize(nbytes)
            if index in sizes:
                sizes[index] = nbytes
        elif index < len(held):
            held[index].release()
            sizes.pop(index, None)
        ledger.check()
        assert ledger.total() == sum(sizes.values())
