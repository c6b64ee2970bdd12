"""A real daemon whose memory is short: floods end or are refused, nothing hangs, and everything comes back."""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from omlxd.rpc.client import Call, RpcError
from tests.e2e.heavy import KV_BYTES_PER_TOKEN, anonymous_bytes, sampling, write_fat, write_heavy
from tests.e2e.living import Daemon, daemon_in_new_home, until
from tests.models import write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="samples Linux's own readings")

MB = 2**20
LEAST = 64 * MB  # less than the daemon itself takes
MARGIN = 64 * MB  # what Python, its threads and malloc may keep beyond what is accounted for
PROMPT = "once upon a time " * 30  # 510 tokens, 32 MB of cache
HOLDERS_OF_WORK = ("kv", "padding", "chunk", "load")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with daemon_in_new_home() as living:
        write_heavy(living.models / "heavy")
        write("llama", living.models / "a", seed=1, eos=[])
        write("llama", living.models / "b", seed=2, eos=[])
        write("llama", living.models / "c", seed=3, eos=[])
        living.start(OMLXD_CACHE__SSD__ENABLED="false")
        yield living


def end_of(call: Call) -> str:
    try:
        call.result(timeout_s=100)
    except RpcError as error:
        return str(error.data["kind"])
    return "answered"


def held(daemon: Daemon, *kinds: str) -> int:
    return sum(e["bytes"] for e in daemon.call("memory.status")["entries"] if not kinds or e["kind"] in kinds)


def leave(daemon: Daemon, nbytes: int) -> int:
    """Sets the limit so that `nbytes` are left to work beside the process and its models; returns the limit."""
    daemon.call("models.load", model="heavy")
    taken = held(daemon, "process", "weights")
    limit = (taken + nbytes) * 100 // 90
    daemon.call("memory.set", limit_bytes=limit)
    return limit


def ask(**changes: Any) -> dict[str, Any]:
    return {"model": "heavy", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **changes}


def test_a_flood_of_long_prompts_ends_under_the_limit_and_leaves_nothing(daemon: Daemon) -> None:
    limit = leave(daemon, 180 * MB)
    assert daemon.process is not None
    with daemon.client() as client, sampling(daemon.process.pid) as seen:
        calls = [client.start("generate.complete", ask(prompt=f"{n} {PROMPT}")) for n in range(8)]
        ends = Counter(end_of(call) for call in calls)
    assert ends == {"answered": 8}
    assert seen.most <= limit + MARGIN, f"{seen.most / MB:.0f} MB of {limit / MB:.0f}"
    until(lambda: daemon.live() == 0 and held(daemon, *HOLDERS_OF_WORK) == 0, within_s=10)


def test_what_could_never_fit_is_refused_before_it_runs(daemon: Daemon) -> None:
    leave(daemon, 90 * MB)
    with pytest.raises(RpcError) as caught:
        daemon.call("generate.complete", **ask(prompt=PROMPT * 3))
    data = caught.value.data
    assert (caught.value.code, data["kind"], data["binding"]) == (-32012, "memory_exceeded", "static")
    assert data["needed_bytes"] > 3 * 510 * KV_BYTES_PER_TOKEN > data["limit_bytes"]
    assert "max_tokens" in data["advice"]
    assert daemon.call("daemon.metrics")["models"]["heavy"]["counters"]["prefill_tokens"] == 0
    assert daemon.call("generate.complete", **ask(prompt="short"))["usage"]["completion_tokens"] == 8


def test_a_quiet_systems_books_agree_with_its_footprint(daemon: Daemon) -> None:
    for model in ("heavy", "a", "b", "heavy"):
        daemon.call("generate.complete", **ask(model=model, prompt="hello " * 40))
    status = daemon.call("memory.status")
    assert abs(status["difference_bytes"]) <= 256 * MB
    assert {entry["kind"] for entry in status["entries"]} >= {"process", "weights", "hot"}


def test_ten_rounds_of_loading_three_models_leave_the_memory_where_it_was(daemon: Daemon) -> None:
    assert daemon.process is not None

    def one_round() -> int:
        for model in ("a", "heavy", "b"):
            daemon.call("generate.complete", **ask(model=model, prompt="hello"))
        for model in ("a", "heavy", "b"):
            daemon.call("models.unload", model=model)
        daemon.call("cache.clear")
        assert held(daemon) == held(daemon, "process")
        return anonymous_bytes(daemon.process.pid)  # type: ignore[union-attr]

    first = [one_round() for _ in range(3)][-1]
    last = [one_round() for _ in range(10)][-1]
    assert last - first <= 16 * MB


def test_a_limit_below_the_use_starts_the_ladder_and_a_higher_one_ends_it(daemon: Daemon) -> None:
    daemon.call("generate.complete", **ask())
    daemon.call("generate.complete", **ask(model="a", prompt="hello"))
    with daemon.client() as client:
        events = client.start("events.subscribe", {"topics": ["memory"]})
        events.result(timeout_s=10)
        low = daemon.call("memory.set", limit_bytes=LEAST)
        assert low["level"] == "HARD"
        until(lambda: held(daemon) == held(daemon, "process"), within_s=30)
    done = [action["what"] for action in daemon.call("memory.status")["actions"]]
    assert any("stored prefixes" in what for what in done)
    assert any("the idle model heavy is unloaded" in what for what in done)
    daemon.call("memory.set", tier="balanced")
    until(lambda: daemon.call("memory.status")["level"] == "OK", within_s=10)
    assert daemon.call("generate.complete", **ask(prompt="again"))["usage"]["completion_tokens"] == 8


def test_another_limit_during_a_stream_leaves_it_unharmed(daemon: Daemon) -> None:
    """PL-09."""
    whole = daemon.call("generate.complete", **ask(prompt="hello", max_tokens=200))["text"]
    with daemon.client() as client:
        call = client.start("generate.complete", ask(prompt="hello", max_tokens=200, stream=True))
        next(value for value in call if value["kind"] == "delta")
        for limit in (2000 * MB, 1000 * MB, 3000 * MB):
            daemon.call("memory.set", limit_bytes=limit)
        assert call.result(timeout_s=60)["text"] == whole


def test_a_pinned_model_outlives_pressure_and_others_needs(daemon: Daemon) -> None:
    """PL-08."""
    daemon.call("models.load", model="a", pin=True)
    daemon.call("generate.complete", **ask(model="b", prompt="hello"))
    daemon.call("memory.set", limit_bytes=LEAST)
    until(lambda: held(daemon, "weights") == held_by(daemon, "a"), within_s=30)
    until(lambda: daemon.call("memory.status")["level"] != "OK", within_s=10)
    assert {m["name"] for m in daemon.call("models.list") if m["state"] == "READY"} == {"a"}
    daemon.call("models.unload", model="a")
    assert held(daemon, "weights") == 0


def held_by(daemon: Daemon, model: str) -> int:
    entries = daemon.call("memory.status")["entries"]
    return sum(e["bytes"] for e in entries if (e["owner"], e["kind"]) == (model, "weights"))


# -- storms -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three() -> Iterator[Daemon]:
    """Three models of 50 MB; there is room for two."""
    with daemon_in_new_home() as living:
        for seed, name in enumerate("abc"):
            write_fat(living.models / name, seed=seed)
        living.start(OMLXD_CACHE__SSD__ENABLED="false")
        living.call("models.load", model="a")
        taken = held(living, "process")
        living.call("memory.set", limit_bytes=(taken + 190 * MB) * 100 // 90)
        yield living


def test_nine_tenths_of_a_models_bytes_come_back_when_it_goes(three: Daemon) -> None:
    assert three.process is not None
    three.call("generate.complete", **short("a", 4))
    three.call("cache.clear")
    before, size = anonymous_bytes(three.process.pid), held(three, "weights")
    freed = three.call("models.unload", model="a")["freed_bytes"]
    until(lambda: before - anonymous_bytes(three.process.pid) >= 0.9 * size, within_s=5)  # type: ignore[union-attr]
    assert 0.9 * size <= freed <= 1.1 * size
    assert held(three) == held(three, "process")


def short(model: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "prompt": "hello", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def test_a_storm_of_loads_evictions_answers_and_cancels_keeps_the_books(three: Daemon) -> None:
    """Five clients, each with its own luck; no answer is lost and none fails for want of memory."""
    alone = {model: three.call("generate.complete", **short(model, 24))["text"] for model in "abc"}
    ends: Counter[str] = Counter()

    def client(seed: int) -> None:
        chance = random.Random(seed)
        with three.client() as connection:
            for _ in range(6):
                model = chance.choice("abc")
                call = connection.start("generate.complete", short(model, 24))
                if chance.random() < 0.3:
                    time.sleep(chance.random() * 0.3)  # the luck of this client, nothing is waited for
                    call.cancel()
                elif chance.random() < 0.2:
                    connection.call("models.unload", {"model": chance.choice("abc")}, timeout_s=60)
                try:
                    assert call.result(timeout_s=100)["text"] == alone[model]
                    ends["answered"] += 1
                except RpcError as error:
                    ends[str(error.data["kind"])] += 1

    with ThreadPoolExecutor(5) as clients:
        list(clients.map(client, range(5)))
    assert set(ends) <= {"answered", "cancelled"}, ends
    assert ends.total() == 30
    until(lambda: three.live() == 0 and held(three, *HOLDERS_OF_WORK) == 0, within_s=10)
    status = three.call("memory.status")
    loaded = [model for model in three.call("models.list") if model["state"] == "READY"]
    weights = {entry["owner"]: entry["bytes"] for entry in status["entries"] if entry["kind"] == "weights"}
    assert set(weights) == {model["name"] for model in loaded}
    assert held(three) == status["ledger_bytes"]
