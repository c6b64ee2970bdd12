"""Metrics in both forms, and events that come after their id, until the connection ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from omlxd.engine.api import DaemonMetrics, Histogram, ModelMetrics
from omlxd.rpc.following import MAX_SUBSCRIPTIONS
from omlxd.rpc.prometheus import prometheus_text
from tests.fakes import FakeBackend
from tests.rpc.peers import serving, until

pytestmark = pytest.mark.anyio


async def test_metrics_are_counters_and_histograms_by_model(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        assert await peer.result("daemon.metrics") == {
            "gauges": {"uptime_s": 1.5, "live_requests": 2},
            "requests": {"finished": 7},
            "models": {
                "tiny": {
                    "counters": {"prompt_tokens": 12},
                    "histograms": {"ttft_s": {"bounds": [0.5, 1], "counts": [3, 0, 1], "sum": 4.5, "count": 4}},
                }
            },
        }


async def test_metrics_come_as_prometheus_text_too(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        text = await peer.result("daemon.metrics", format="prometheus")
    assert text.splitlines() == [
        "# TYPE omlxd_uptime_seconds gauge",
        "omlxd_uptime_seconds 1.5",
        "# TYPE omlxd_live_requests gauge",
        "omlxd_live_requests 2",
        "# TYPE omlxd_requests_total counter",
        'omlxd_requests_total{outcome="finished"} 7',
        "# TYPE omlxd_prompt_tokens_total counter",
        'omlxd_prompt_tokens_total{model="tiny"} 12',
        "# TYPE omlxd_ttft_seconds histogram",
        'omlxd_ttft_seconds_bucket{model="tiny",le="0.5"} 3',
        'omlxd_ttft_seconds_bucket{model="tiny",le="1"} 3',
        'omlxd_ttft_seconds_bucket{model="tiny",le="+Inf"} 4',
        'omlxd_ttft_seconds_sum{model="tiny"} 4.5',
        'omlxd_ttft_seconds_count{model="tiny"} 4',
    ]


def test_a_models_name_cannot_break_the_prometheus_text() -> None:
    metrics = DaemonMetrics({}, {}, {'a"\n\\b': ModelMetrics({"prompt_tokens": 1}, {})})
    assert 'omlxd_prompt_tokens_total{model="a\\"\\n\\\\b"} 1' in prometheus_text(metrics).splitlines()


def test_a_family_stands_together_whatever_models_there_are() -> None:
    each = ModelMetrics({"prompt_tokens": 1}, {"decode_tokens_per_s": Histogram((), (2,), 80.0)})
    lines = prometheus_text(DaemonMetrics({}, {}, {"a": each, "b": each})).splitlines()
    assert [line.split(" ")[2] for line in lines if line.startswith("#")] == [
        "omlxd_requests_total",
        "omlxd_prompt_tokens_total",
        "omlxd_decode_tokens_per_second",
    ]


async def test_events_come_after_the_answer_that_has_their_subscription(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer(headers=True) as peer:
        await peer.send(peer.request("events.subscribe", topics=["models", "cache"]))
        assert (await peer.read())["result"] == "s1"
        [subscription] = backend.subscriptions
        assert subscription.topics == {"models", "cache"}
        subscription.push("models", model="tiny", state="READY", error=None)
        subscription.push("cache", dropped=3, what="cleared")
        assert await peer.read() == {
            "jsonrpc": "2.0",
            "method": "event",
            "params": {
                "topic": "models",
                "subscription": "s1",
                "at": 7.5,
                "model": "tiny",
                "state": "READY",
                "error": None,
            },
        }
        assert (await peer.read())["params"] == {
            "topic": "cache",
            "subscription": "s1",
            "at": 7.5,
            "dropped": 3,
            "what": "cleared",
        }


async def test_events_come_between_the_answers_to_other_requests(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.result("events.subscribe", topics=["requests"])
        assert await peer.result("ping") == "pong"
        backend.subscriptions[0].push("requests", what="started")
        assert (await peer.read())["method"] == "event"
        assert await peer.result("ping") == "pong"


@pytest.mark.parametrize("how", ["leaves", "exit"])
async def test_a_subscription_ends_with_its_connection(backend: FakeBackend, path: Path, how: str) -> None:
    async with serving(backend, path) as running:
        async with running.peer() as peer:
            await peer.result("events.subscribe", topics=["models"])
            if how == "exit":
                await peer.send({"jsonrpc": "2.0", "method": "exit"})
                assert await peer.at_end()
        await until(lambda: backend.subscriptions[0].is_closed)


async def test_a_subscriber_who_does_not_read_holds_nothing_up(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.result("events.subscribe", topics=["models"])
        subscription = backend.subscriptions[0]
        for _ in range(200):
            subscription.push("models", text="x" * 10_000)
        await until(lambda: len(subscription.waiting) < 200)
        assert len(subscription.waiting) > 100  # the socket is full, and nothing else holds them
        await running.server.drain()
    assert subscription.is_closed


async def test_a_subscription_keeps_no_server_from_ending(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.result("events.subscribe", topics=["models"])
        await running.server.drain()


async def test_a_connection_has_a_bounded_number_of_subscriptions(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        for _ in range(MAX_SUBSCRIPTIONS):
            await peer.result("events.subscribe", topics=["models"])
        error = await peer.error("events.subscribe", topics=["models"])
        assert error["code"] == -32600
        assert "16 subscriptions" in error["message"]
        assert [each.is_closed for each in backend.subscriptions] == [False] * 16 + [True]


@pytest.mark.parametrize("topics", [[], ["weather"], "models", None])
async def test_topics_are_some_of_the_four(backend: FakeBackend, path: Path, topics: object) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        error = await peer.error("events.subscribe", topics=topics)
        assert (error["code"], error["data"]["field"]) == (-32602, "topics")


async def test_the_openrpc_document_has_the_event_notification(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        document = await peer.result("rpc.discover")
    assert [each["name"] for each in document["x-notifications"]] == ["$/progress", "event"]
    assert "EventValue" in document["components"]["schemas"]
