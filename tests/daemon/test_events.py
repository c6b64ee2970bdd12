"""Events reach whoever asked for their topic, in order, and a slow reader loses the oldest and hears how many."""

from __future__ import annotations

import asyncio
from typing import Any

from omlxd.daemon.events import MAX_WAITING, EventHub, EventQueue
from omlxd.engine.api import DaemonEvent


def hub() -> EventHub:
    return EventHub(now=lambda: 7.5)


async def taken(queue: EventQueue, count: int) -> list[tuple[DaemonEvent, int]]:
    reading = aiter(queue)
    return [await asyncio.wait_for(anext(reading), 10) for _ in range(count)]


def run(main: Any) -> Any:
    return asyncio.run(main())


def test_a_subscription_gets_the_events_of_its_topics_in_order() -> None:
    async def main() -> list[tuple[DaemonEvent, int]]:
        events = hub()
        queue = events.subscribe(["models", "cache"])
        events.publish("models", model="a", state="LOADING")
        events.publish("requests", what="started")
        events.publish("cache", what="cleared")
        return await taken(queue, 2)

    assert run(main) == [
        (DaemonEvent("models", 7.5, {"model": "a", "state": "LOADING"}), 0),
        (DaemonEvent("cache", 7.5, {"what": "cleared"}), 0),
    ]


def test_what_happened_before_is_not_told() -> None:
    async def main() -> list[tuple[DaemonEvent, int]]:
        events = hub()
        events.publish("models", model="before")
        queue = events.subscribe(["models"])
        events.publish("models", model="after")
        return await taken(queue, 1)

    assert run(main)[0][0].fields == {"model": "after"}


def test_a_slow_reader_loses_the_oldest_and_is_told_how_many_once() -> None:
    async def main() -> list[tuple[Any, int]]:
        events = hub()
        queue = events.subscribe(["requests"])
        for number in range(MAX_WAITING + 3):
            events.publish("requests", id=number)
        return [(event.fields["id"], dropped) for event, dropped in await taken(queue, MAX_WAITING)]

    assert run(main)[:2] == [(3, 3), (4, 0)]


def test_one_slow_reader_costs_the_others_nothing() -> None:
    async def main() -> int:
        events = hub()
        events.subscribe(["requests"])
        quick = events.subscribe(["requests"])
        reading, dropped_by_quick = aiter(quick), 0
        for number in range(2 * MAX_WAITING):
            events.publish("requests", id=number)
            dropped_by_quick += (await anext(reading))[1]
        return dropped_by_quick

    assert run(main) == 0


def test_a_reader_who_waits_is_woken_and_a_closed_one_ends() -> None:
    async def main() -> list[DaemonEvent]:
        events = hub()
        queue = events.subscribe(["models"])

        async def read() -> list[DaemonEvent]:
            return [event async for event, _ in queue]

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        events.publish("models", model="a")
        await asyncio.sleep(0)
        queue.close()
        queue.close()
        events.publish("models", model="b")
        return await asyncio.wait_for(reading, 10)

    assert [event.fields["model"] for event in run(main)] == ["a"]


def test_subscriptions_have_ids_of_their_own() -> None:
    async def main() -> set[str]:
        events = hub()
        return {events.subscribe(["models"]).id for _ in range(3)}

    assert len(run(main)) == 3
