"""The cache and the daemon's numbers, from end to end: what one client computed serves the next, and it can be seen."""

from __future__ import annotations

from typing import Any

from omlxd.rpc.client import Client
from tests.e2e.living import Daemon, until

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 5
TOKENS = len(PROMPT)  # one for each byte


def line(daemon: Daemon) -> dict[str, Any]:
    (found,) = daemon.call("cache.stats", model="tiny")
    return dict(found)


def complete(daemon: Daemon, prompt: str, **params: Any) -> Any:
    return daemon.call("generate.complete", model="tiny", prompt=prompt, max_tokens=2, temperature=0, **params)


def test_what_was_warmed_is_reused_and_outlives_its_model(daemon: Daemon) -> None:
    assert daemon.call("cache.warm", model="tiny", prompt=PROMPT) == {"prompt_tokens": TOKENS, "cached_tokens": 0}
    before = line(daemon)
    assert complete(daemon, PROMPT)["usage"]["cached_tokens"] == TOKENS - 1
    daemon.call("models.unload", model="tiny")
    after = line(daemon)
    assert after["bytes"]["hot"] >= before["bytes"]["hot"] > 0
    assert after["hits"] == before["hits"] + 1
    assert after["tokens_matched"] == before["tokens_matched"] + TOKENS - 1
    assert after["tokens_computed"] == before["tokens_computed"] + 1
    assert complete(daemon, PROMPT)["usage"]["cached_tokens"] == TOKENS - 1


def test_a_miss_can_be_explained_in_text(daemon: Daemon) -> None:
    nothing = daemon.call("cache.explain", model="tiny", prompt=PROMPT)
    assert nothing == {"prompt_tokens": TOKENS, "matched_tokens": 0, "reason": "nothing_stored"}
    daemon.call("cache.warm", model="tiny", prompt=PROMPT)
    found = daemon.call("cache.explain", model="tiny", prompt=PROMPT.replace("thirteen", "twelve", 1))
    at = PROMPT.index("thirteen") + 1
    assert (found["matched_tokens"], found["reason"], found["differs_at"]["token"]) == (at, "differs", at)
    assert found["differs_at"]["stored_text"] == PROMPT[at - 16 : at + 16]
    assert found["differs_at"]["prompt_text"].startswith(" were striking twelve. It was")


def test_clearing_gives_the_bytes_back_and_a_loaded_model_goes_on(daemon: Daemon) -> None:
    daemon.call("cache.warm", model="tiny", prompt=PROMPT)
    held = line(daemon)["bytes"]["hot"]
    assert daemon.call("daemon.status")["cache"]["bytes"]["hot"] == held
    until(lambda: line(daemon)["blocks"]["ssd"] > 0)
    until(lambda: not daemon.call("daemon.status")["cache"]["ssd"]["queued_bytes"])
    on_disk = line(daemon)["bytes"]["ssd"]
    assert daemon.call("cache.clear", tier="ssd") == {"freed_bytes": on_disk}
    assert daemon.call("cache.clear", model="tiny", tier="hot") == {"freed_bytes": held}
    assert (line(daemon)["bytes"]["hot"], line(daemon)["blocks"]["hot"]) == (0, 0)
    assert complete(daemon, PROMPT)["usage"]["cached_tokens"] == 0
    assert complete(daemon, PROMPT)["usage"]["cached_tokens"] == TOKENS - 1


def test_metrics_are_those_of_the_answers_and_outlive_the_model(daemon: Daemon) -> None:
    def read() -> tuple[dict[str, int], dict[str, Any]]:
        model = daemon.call("daemon.metrics")["models"]["tiny"]
        return model["counters"], model["histograms"]

    complete(daemon, "x")
    before, histograms = read()
    usage = complete(daemon, PROMPT)["usage"]
    daemon.call("models.unload", model="tiny")
    after, spread = read()
    assert after["prompt_tokens"] - before["prompt_tokens"] == usage["prompt_tokens"]
    assert after["requests_finished"] - before["requests_finished"] == 1
    assert spread["ttft_s"]["count"] - histograms["ttft_s"]["count"] == 1
    complete(daemon, "x")
    assert read()[0]["requests_finished"] == after["requests_finished"] + 1
    text = daemon.call("daemon.metrics", format="prometheus")
    assert f'omlxd_ttft_seconds_count{{model="tiny"}} {spread["ttft_s"]["count"] + 1}\n' in text


def test_events_tell_what_happens_to_models_requests_and_the_cache(daemon: Daemon) -> None:
    told: list[dict[str, Any]] = []

    def hear(method: str, params: dict[str, Any]) -> None:
        told.append(params)

    with Client.connect(daemon.home.socket, on_notification=hear) as client:
        subscription = client.call("events.subscribe", {"topics": ["models", "requests", "cache"]})
        client.call("cache.warm", {"model": "tiny", "prompt": "secret"}, timeout_s=60)
        client.call("models.unload", {"model": "tiny"}, timeout_s=60)
        client.call("cache.clear", {"model": "tiny"}, timeout_s=60)
        client.call("ping")
    assert {each["subscription"] for each in told} == {subscription}
    shown = [each.get("state") or each.get("outcome") or each["what"] for each in told]
    assert shown == [
        "started",
        "LOADING",
        "READY",
        "BUSY",
        "READY",
        "finished",
        "DRAINING",
        "UNLOADING",
        "ABSENT",
        "cleared",
    ]
    assert "secret" not in str(told)
