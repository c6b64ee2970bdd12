"""Any history of requests, evictions, restarts and spoilt files: disk and memory against a cache that never forgets."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from omlxd.cache.hot import HotTier
from tests.cache import synthetic
from tests.cache.shelves import flush, open_store, shelved
from tests.cache.synthetic import assert_restored, feed, new_cache
from tests.cache.test_properties import LAYOUTS, LINE, SEQUENCES

PLENTY = 1 << 30
BLOCK = 4
EXAMPLES = 25  # 200 of each layout were run when this was written


class Restarts(RuleBasedStateMachine):
    """One model's cache over a directory, and `shadow`: the same requests' cache in memory that is never emptied."""

    layout = "full"

    @initialize(budget=st.sampled_from([PLENTY, 1500, 200, 0]))
    def start(self, budget):
        self.home = Path(tempfile.mkdtemp(prefix="omlxd-"))
        self.budget = budget
        self.shadow = new_cache(vars(synthetic)[self.layout](), HotTier(PLENTY), block=BLOCK)
        self.is_spoilt = False
        # A block that is cut after its window has turned is completed from others in memory, if they still are there.
        self.may_lack_rows = self.layout in ("windowed", "sinks", "hybrid") and budget < PLENTY
        self._open()

    def _open(self):
        self.store = open_store(self.home)
        self.here = shelved(
            self.store, vars(synthetic)[self.layout](), HotTier(self.budget), root=b"r" * 32, block=BLOCK
        )

    @rule(tokens=SEQUENCES, chunk=st.integers(1, 9))
    def request(self, tokens, chunk):
        """A prompt is fetched, looked up and computed, in both worlds with the same chunks."""
        flush(self.store)
        expected = self.shadow.match_length(tokens)
        restoration = self.here.restoration(tokens)
        self.here.cache.check()
        hit = self.here.cache.lookup(tokens)
        restoration.release()
        self.here.cache.check()
        assert self.here.tier.stats().free_bytes >= 0
        assert_restored(hit.caches, tokens, hit.num_tokens)
        if not self.is_spoilt and not self.may_lack_rows:
            assert hit.num_tokens >= expected  # whatever fits into memory
        stored = hit.num_tokens
        for start in range(hit.num_tokens, len(tokens), chunk):
            stop = min(len(tokens), start + chunk)
            feed(hit.caches, tokens, start, stop)
            self.here.cache.publish(tokens, hit.caches, stop, since=stored)
            self.here.cache.checkpoint(tokens, hit.caches, stop, since=stop)
            stored = stop
        twin = self.shadow.lookup(tokens[: hit.num_tokens + 1])
        start = twin.num_tokens
        if start < hit.num_tokens:
            feed(twin.caches, tokens, start, hit.num_tokens)
        for start in range(hit.num_tokens, len(tokens), chunk):
            stop = min(len(tokens), start + chunk)
            feed(twin.caches, tokens, start, stop)
            self.shadow.publish(tokens, twin.caches, stop)
            self.shadow.checkpoint(tokens, twin.caches, stop)
        twin.release()
        hit.release()
        self.here.cache.check()

    @rule()
    def forget_what_is_in_memory(self):
        self.here.cache.clear()

    @rule()
    def restart(self):
        assert self.store.close(30) == 0
        self._open()

    @rule(pick=st.integers(0, 1000), how=st.sampled_from(["flip", "cut", "remove", "swap"]))
    def spoil(self, pick, how):
        flush(self.store)
        files = sorted(self.home.glob("cache/*/*.safetensors"))
        if not files:
            return
        self.is_spoilt = True
        path, other = files[pick % len(files)], files[(pick + 1) % len(files)]
        data = path.read_bytes()
        if not data and how in ("flip", "cut"):
            return  # it was cut to nothing before
        if how == "flip":
            at = pick % len(data)
            path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        elif how == "cut":
            path.write_bytes(data[: pick % len(data)])
        elif how == "remove":
            path.unlink()
        else:
            path.write_bytes(other.read_bytes())

    @rule()
    def lose_the_index(self):
        assert self.store.close(30) == 0
        for path in self.home.glob("cache/index.sqlite*"):
            path.unlink()
        self._open()
        flush(self.store)

    def teardown(self):
        self.store.close(30)
        shutil.rmtree(self.home)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_history_restores_what_was_computed_and_forgets_nothing_by_itself(layout):
    run_state_machine_as_test(
        type(f"Restarts_{layout}", (Restarts,), {"layout": layout}),
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("asked", [5, 7])
def test_what_memory_lacks_of_a_block_comes_from_disk(asked):
    """Found by the machine: a block with a gap stood for what the disk had whole, and the hit fell to 1."""
    machine = type("RestartsHybrid", (Restarts,), {"layout": "hybrid"})()
    machine.start(budget=200)
    machine.may_lack_rows = False
    try:
        for prompt in (LINE[:1], LINE[:10], LINE[:asked]):
            machine.request(tokens=[*prompt, 0], chunk=1)
    finally:
        machine.teardown()
