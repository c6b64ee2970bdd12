"""A request whose prefix is on disk waits for it while others decode, and for no longer than it is worth."""

from __future__ import annotations

import asyncio
import queue
import threading
from dataclasses import replace

import pytest

from omlxd.cache.disk import Disk
from omlxd.cache.hot import HotTier
from omlxd.engine.api import Cancelled
from omlxd.engine.engine import Engine
from omlxd.engine.fetching import SILENT_S, Fetching, Lender
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.inbox import Close
from omlxd.engine.prefixes import Prefixes
from omlxd.engine.request import Request
from omlxd.engine.scheduler import SchedulerLimits
from tests.cache.running import prompt
from tests.cache.shelves import of_model, open_store
from tests.engine.running import Running, assert_is_the_cold_run, engine, job, loaded, tokenizer
from tests.models import MODELS, build

pytestmark = pytest.mark.anyio

BLOCK_BYTES = 8300  # a little more than a llama's block of 16 tokens


def with_store(store, name, model, tier=None):
    here = of_model(store, name, tier)
    return replace(loaded(name, model), cache=here.cache, store=here.view)


class SlowDisk(Disk):
    """Reads wait until the test lets them go on."""

    def __init__(self):
        self.reading = threading.Event()
        self.go_on = threading.Event()

    def read(self, path):
        self.reading.set()
        assert self.go_on.wait(60)
        return super().read(path)


class Clock:
    """Stands still until it is moved."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


async def stored(tmp_path, name, model, tokens):
    """Generates once and stops: what is on disk then, and the answer."""
    store = open_store(tmp_path)
    async with engine(with_store(store, name, model)) as running:
        result = await Running(running, job(tokens)).result()
    assert store.close(30) == 0
    return result


@pytest.mark.parametrize("name", MODELS)
async def test_after_a_restart_an_answer_is_the_cold_one_and_its_prompt_is_not_computed_again(name, tmp_path):
    model = build(name)
    tokens = prompt(100)
    first = await stored(tmp_path, name, model, tokens)
    longer = [*tokens, *first.token_ids, *prompt(7, seed=3)]
    here = with_store(store := open_store(tmp_path), name, model)
    async with engine(here) as running:
        result = await Running(running, job(longer, logprobs=20)).result()
    store.close(30)
    assert_is_the_cold_run(model, result)
    assert result.usage.cached_tokens == len(tokens) + len(first.token_ids)  # as if nothing had stopped
    assert result.timings.fetch_ms > 0


async def test_others_decode_while_a_prefix_is_read(tmp_path):
    model = build("llama")
    tokens = prompt(100)
    await stored(tmp_path, "llama", model, tokens)
    disk = SlowDisk()
    store = open_store(tmp_path, disk=disk)
    async with engine(with_store(store, "llama", model), clock=Clock()) as running:
        reader = Running(running, job(tokens))
        await asyncio.to_thread(disk.reading.wait, 60)
        other = await Running(running, job(prompt(20, seed=9), 30)).result()
        assert len(other.token_ids) == 30
        (info,) = [each for each in running.requests if each.id == reader.job.id]
        assert info.state == "FETCHING"
        disk.go_on.set()
        result = await reader.result()
    store.close(30)
    assert result.usage.cached_tokens == 99
    assert_is_the_cold_run(model, result)


async def test_a_request_can_be_cancelled_while_its_prefix_is_read(tmp_path):
    model = build("llama")
    tokens = prompt(100)
    await stored(tmp_path, "llama", model, tokens)
    disk = SlowDisk()
    store = open_store(tmp_path, disk=disk)
    async with engine(with_store(store, "llama", model), clock=Clock()) as running:
        reader = Running(running, job(tokens))
        await asyncio.to_thread(disk.reading.wait, 60)
        running.abort(reader.job.id, None)
        with pytest.raises(Cancelled):
            await reader.result()
        disk.go_on.set()
        again = await Running(running, job(tokens)).result()
    store.close(30)
    assert_is_the_cold_run(model, again)


async def test_a_read_that_is_under_way_does_not_keep_an_unloaded_model(tmp_path):
    tokens = prompt(100)
    await stored(tmp_path, "llama", build("llama"), tokens)
    disk = SlowDisk()
    store = open_store(tmp_path, disk=disk)
    running = Engine(with_store(store, "llama", build("llama")), SchedulerLimits(), Clock())
    reader = Running(running, job(tokens))
    await asyncio.to_thread(disk.reading.wait, 60)
    running.close(Close("unloaded"))
    closed = await asyncio.wait_for(running.closed, 30)
    disk.go_on.set()
    store.close(30)
    with pytest.raises(Cancelled):
        await reader.result()
    assert closed.remains is None


async def test_a_silent_disk_is_not_waited_for(tmp_path):
    model = build("llama")
    tokens = prompt(100)
    await stored(tmp_path, "llama", model, tokens)
    disk = SlowDisk()
    store = open_store(tmp_path, disk=disk)
    clock = Clock()
    async with engine(with_store(store, "llama", model), clock=clock) as running:
        asked = Running(running, job(tokens))
        await asyncio.to_thread(disk.reading.wait, 60)
        clock.now += SILENT_S
        result = await asked.result()
        assert result.usage.cached_tokens == 0
        assert_is_the_cold_run(model, result)
        disk.go_on.set()
    store.close(30)


async def test_clients_with_one_prefix_read_it_once(tmp_path):
    model = build("llama")
    tokens = prompt(100)
    await stored(tmp_path, "llama", model, tokens)
    store = open_store(tmp_path)
    async with engine(with_store(store, "llama", model)) as running:
        asked = [Running(running, job([*tokens, *prompt(3, seed=n)])) for n in range(4)]
        results = [await each.result() for each in asked]
    assert store.stats().counts["read"] <= 7 + 3
    store.close(30)
    assert [result.usage.cached_tokens for result in results] == [100] * 4


@pytest.mark.parametrize(("name", "blocks"), [("llama", 0), ("lfm2", 0), *((name, 2) for name in MODELS)])
async def test_a_prefix_longer_than_the_hot_tier_is_restored_whole_and_gone_from_it_at_the_end(name, blocks, tmp_path):
    """CASES PC-31, after a restart: what is read for a request is its own until it begins, on its own account."""
    model = build(name)
    tokens = prompt(100)
    await stored(tmp_path, name, model, tokens)
    store = open_store(tmp_path)
    tier, guard = HotTier(blocks * BLOCK_BYTES), MemoryGuard()
    here = with_store(store, name, model, tier)
    async with engine(here, guard=guard) as running:
        result = await Running(running, job(tokens, logprobs=20)).result()
    assert store.close(30) == 0
    assert result.usage.cached_tokens == 99
    assert_is_the_cold_run(model, result)
    assert tier.stats().used_bytes <= blocks * BLOCK_BYTES
    here.cache.check()
    guard.ledger.check()
    assert guard.ledger.held(["kv"]) == 0


async def test_followers_of_a_fetch_beyond_the_hot_tier_have_it_too(tmp_path):
    model = build("llama")
    tokens = prompt(100)
    await stored(tmp_path, "llama", model, tokens)
    store = open_store(tmp_path)
    tier, guard = HotTier(2 * BLOCK_BYTES), MemoryGuard()
    async with engine(with_store(store, "llama", model, tier), guard=guard) as running:
        asked = [Running(running, job([*tokens, *prompt(3, seed=n)])) for n in range(4)]
        results = [await each.result() for each in asked]
    store.close(30)
    assert [result.usage.cached_tokens for result in results] == [100] * 4
    assert tier.stats().used_bytes <= 2 * BLOCK_BYTES
    assert guard.ledger.held(["kv"]) == 0


async def test_without_memory_for_what_is_beyond_the_hot_tier_it_is_computed_instead(tmp_path):
    model = build("llama")
    tokens = prompt(100)
    await stored(tmp_path, "llama", model, tokens)
    store = open_store(tmp_path)
    here = of_model(store, "llama", HotTier(2 * BLOCK_BYTES))
    arrived, prefixes = queue.Queue(), Prefixes(model, here.cache)
    lender = Lender(admit=lambda request: True, lend=lambda nbytes: None)
    fetching = Fetching(here.view, prefixes, lender, deliver=arrived.put, rate=lambda: None, clock=Clock())
    request = Request(job(tokens), tokenizer(), Clock())
    assert fetching.begin(request)
    over: list[Request] = []
    while not over:
        arrived.get(timeout=60)()
        over = fetching.over()
    store.close(30)
    assert prefixes.would_reuse(request) == 2 * 16
    assert here.tier.stats().pinned_bytes == 0
    here.cache.check()


class Dear(Disk):
    """Every file takes a tenth of a second, by a clock that is moved by hand."""

    def __init__(self, clock):
        self.clock = clock

    def read(self, path):
        self.clock.now += 0.1
        return super().read(path)


async def test_a_disk_that_is_slower_than_computing_is_left_after_its_first_files(tmp_path):
    model = build("llama")
    tokens = prompt(200)
    await stored(tmp_path, "llama", model, tokens)
    clock = Clock()
    store = open_store(tmp_path, disk=Dear(clock))
    here = of_model(store, "llama")
    arrived = queue.Queue()
    prefixes = Prefixes(model, here.cache)
    nothing = Lender(admit=lambda request: False, lend=lambda nbytes: None)
    fetching = Fetching(here.view, prefixes, nothing, deliver=arrived.put, rate=lambda: 1000.0, clock=clock)
    request = Request(job(tokens), tokenizer(), clock)
    assert fetching.begin(request)
    over: list[Request] = []
    while not over:
        arrived.get(timeout=60)()
        over = fetching.over()
    store.close(30)
    assert over == [request]
    assert 0 < prefixes.would_reuse(request) < 199


class StuckWriter(Disk):
    """Writes wait until the test lets them go on."""

    def __init__(self):
        self.go_on = threading.Event()

    def write(self, path, parts, *, durable=False):
        assert self.go_on.wait(60)
        super().write(path, parts, durable=durable)


async def test_what_was_evicted_before_it_was_written_comes_from_the_queue(tmp_path):
    """CASES PC-31: a writer that gets nowhere, a hot tier of two blocks, and two prompts of four in turn."""
    model = build("llama")
    tokens, other = prompt(65), prompt(65, seed=9)  # four blocks of 16 and the token that is drawn from
    disk = StuckWriter()
    store = open_store(tmp_path, disk=disk)
    here = with_store(store, "llama", model, HotTier(2 * BLOCK_BYTES))
    async with engine(here, clock=Clock()) as running:
        await Running(running, job(tokens, 1)).result()
        await Running(running, job(other, 1)).result()
        again = await Running(running, job(tokens, 4, logprobs=20)).result()
        disk.go_on.set()
    assert store.close(30) == 0
    assert_is_the_cold_run(model, again)
    assert again.usage.cached_tokens == 4 * 16  # in memory there was room for two blocks of the other prompt


async def test_a_request_that_reads_twice_leaves_nothing_held(tmp_path):
    model, tokens = build("llama"), prompt(100)
    store = open_store(tmp_path)
    tier = HotTier(1 << 20)
    here = of_model(store, "llama", tier)
    async with engine(replace(loaded("llama", model), cache=here.cache)) as running:
        await Running(running, job(tokens)).result()
    prefixes, request = Prefixes(model, here.cache), Request(job(tokens), tokenizer(), Clock())
    for _ in range(2):
        restoration = prefixes.restoration(request)
        assert restoration is not None
        prefixes.keep(restoration, [request])
        assert tier.stats().pinned_bytes > 0
    prefixes.forget(request)
    store.close(30)
    assert tier.stats().pinned_bytes == 0
