"""Who waits in which order, and who waits for whom."""

from __future__ import annotations

from omlxd.engine.following import STALLED_S, Following
from omlxd.engine.line import AGEING_S, Hold, Line
from omlxd.engine.request import Request, State
from tests.engine.running import job, tokenizer

BLOCK = 4


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(clock: Clock, name: str = "", prompt: list[int] | None = None, **changes: object) -> Request:
    fields = {"id": name, **changes} if name else changes
    return Request(job(prompt or [1, 2, 3], **fields), tokenizer(), clock)


def ids(requests: list[Request]) -> list[str]:
    return [each.id for each in requests]


# -- the line ---------------------------------------------------------------------------------------------------------


def line_of(clock: Clock, *names: str) -> Line:
    """A line of requests; names that begin with b are batch requests."""
    line = Line(clock)
    for name in names:
        line.add(request(clock, name, batch_priority=name.startswith("b")))
    return line


def test_interactive_requests_go_before_batch_ones_each_in_order_of_arrival() -> None:
    line = line_of(Clock(), "b1", "i1", "b2", "i2")
    assert ids(line.head(9)) == ["i1", "i2", "b1", "b2"]
    assert ids(line.head(3)) == ["i1", "i2", "b1"]


def test_a_batch_request_that_has_waited_long_enough_goes_first() -> None:
    clock = Clock()
    line = line_of(clock, "b1", "i1")
    clock.now = AGEING_S
    line.add(request(clock, "b2", batch_priority=True))
    assert ids(line.head(9)) == ["b1", "i1", "b2"]


def test_one_who_comes_back_is_first_of_its_kind() -> None:
    clock = Clock()
    line = line_of(clock, "i1", "b1")
    line.put_first(request(clock, "b0", batch_priority=True))
    assert ids(line.head(9)) == ["i1", "b0", "b1"]


def test_held_requests_are_out_of_the_line_and_come_back_in_their_order() -> None:
    clock = Clock()
    line = line_of(clock, "i1", "i2", "i3")
    for each in line.head(2):
        line.hold(Hold(each, "leader", 8))
    assert ids(line.head(9)) == ["i3"]
    assert (line.waiting, len(line)) == (1, 3)
    held = line.get("i1")
    assert held is not None
    assert held.state is State.HELD
    assert held.reason == "leader computes its first 8 tokens"
    line.release(line.holds)
    assert ids(line.head(9)) == ["i1", "i2", "i3"]
    assert held.state is State.QUEUED


def test_a_held_request_can_be_removed() -> None:
    line = line_of(Clock(), "i1")
    (only,) = line.head(1)
    line.hold(Hold(only, "leader", 8))
    line.remove(only)
    assert len(line) == 0
    assert list(line) == []


# -- following --------------------------------------------------------------------------------------------------------

SHARED = [7] * 10


def leading(clock: Clock, computed: int = 0) -> tuple[Following, Request]:
    following = Following(clock, block_size=BLOCK)
    leader = request(clock, "leader", [*SHARED, 1, 2, 3, 4, 5, 6])
    following.lead(leader, computed)
    return following, leader


def nothing_stored(_: Request) -> int:
    return 0


def test_one_who_shares_a_block_waits_until_the_shared_part_is_stored() -> None:
    clock = Clock()
    following, leader = leading(clock)
    follower = request(clock, "follower", [*SHARED, 9, 9])
    hold = following.hold_for(follower, nothing_stored)
    assert hold == Hold(follower, "leader", 10)
    assert hold is not None
    following.moved(leader, computed=8, stored=8)
    assert not following.over(hold)
    following.moved(leader, computed=10, stored=10)
    assert following.over(hold)


def test_the_last_token_of_a_prompt_is_never_waited_for() -> None:
    following, _ = leading(Clock())
    follower = request(Clock(), "follower", SHARED)
    hold = following.hold_for(follower, nothing_stored)
    assert hold is not None
    assert hold.until == 9


def test_less_than_a_block_more_than_is_stored_is_not_worth_waiting_for() -> None:
    following, _ = leading(Clock())
    assert following.hold_for(request(Clock(), prompt=[7, 7, 7, 9, 9]), nothing_stored) is None
    assert following.hold_for(request(Clock(), prompt=[*SHARED, 9]), lambda _: 7) is None


def test_nobody_waits_for_what_the_leader_has_passed() -> None:
    following, _ = leading(Clock(), computed=12)
    assert following.hold_for(request(Clock(), prompt=[*SHARED, 9]), nothing_stored) is None


def test_followers_of_a_leader_that_left_go_on() -> None:
    following, leader = leading(Clock())
    hold = following.hold_for(request(Clock(), prompt=[*SHARED, 9]), nothing_stored)
    assert hold is not None
    following.stop(leader)
    assert following.over(hold)


def test_followers_wait_only_as_long_as_the_leader_gets_on() -> None:
    clock = Clock()
    following, leader = leading(clock)
    follower = request(clock, prompt=[*SHARED, 9])
    hold = following.hold_for(follower, nothing_stored)
    assert hold is not None
    clock.now = STALLED_S
    following.moved(leader, computed=4, stored=4)
    clock.now = 2 * STALLED_S
    assert not following.over(hold)
    clock.now += 1
    assert following.over(hold)
    assert following.hold_for(follower, nothing_stored) is None


def test_a_request_without_cache_neither_waits_nor_is_waited_for() -> None:
    following, _ = leading(Clock())
    assert following.hold_for(request(Clock(), prompt=[*SHARED, 9], use_cache=False), nothing_stored) is None
    alone = Following(Clock(), block_size=BLOCK)
    alone.lead(request(Clock(), prompt=[*SHARED, 1], use_cache=False), 0)
    assert alone.hold_for(request(Clock(), prompt=[*SHARED, 9]), nothing_stored) is None
