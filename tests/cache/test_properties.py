"""Any history of requests, evictions and shrinks: the cache against a plain list of sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from omlxd.cache.hot import HotTier
from omlxd.cache.keys import MediaSpan
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from tests.cache import synthetic
from tests.cache.synthetic import Shelf, assert_restored, feed, new_cache

PLENTY = 1 << 30
EXAMPLES = 150  # 800 of each layout were run when this was written
# Most prompts leave one line somewhere, so that they share prefixes of all lengths, in and around blocks of 4.
LINE = [0, 1, 1, 0, 2, 0, 1, 2, 2, 0, 1, 0, 0, 2, 1, 1, 2, 0, 2, 1]
SEQUENCES = st.builds(
    lambda shared, tail: LINE[:shared] + tail, st.integers(0, 20), st.lists(st.integers(0, 2), min_size=1, max_size=5)
)
PICTURES = st.sampled_from([None, 0, 0, 1])
LAYOUTS = ["full", "windowed", "sinks", "hybrid", "recurrent"]


def spans_of(tokens: list[int], picture: int | None) -> tuple[MediaSpan, ...]:
    """A picture over tokens 3 to 6 of a prompt that is long enough."""
    return (MediaSpan(3, 7, bytes([picture])),) if picture is not None and len(tokens) > 7 else ()


def common(one: tuple[list[int], tuple[MediaSpan, ...]], other: tuple[list[int], tuple[MediaSpan, ...]]) -> int:
    """The leading tokens two prompts share, never ending inside a picture or going into a different one."""
    run = next((i for i, (a, b) in enumerate(zip(one[0], other[0], strict=False)) if a != b), None)
    run = min(len(one[0]), len(other[0])) if run is None else run
    for span in {*one[1], *other[1]}:
        if span.start < run and (span not in one[1] or span not in other[1]):
            run = span.start
    return run


def outside(position: int, spans: tuple[MediaSpan, ...]) -> int:
    return next((span.start for span in spans if span.start < position < span.stop), position)


class Requests(RuleBasedStateMachine):
    """Two engines' caches under one budget; `published` are the (tokens, spans, stop) of every publish so far."""

    layout = "full"
    caches: Sequence[PrefixCache] = ()
    hits = Bundle("hits")

    @initialize(budget=st.sampled_from([PLENTY, PLENTY, 400, 1500]))
    def start(self, budget):
        self.tier = HotTier(budget)
        caches = vars(synthetic)[self.layout]()
        self.shelves = [Shelf(), Shelf()]
        self.caches = [
            new_cache(caches, self.tier, root=root, store=shelf)
            for root, shelf in zip((b"one", b"other"), self.shelves, strict=True)
        ]
        self.fresh = ModelLayout(caches).fresh
        self.published = [[], []]
        self.kept_everything = budget == PLENTY

    @rule(which=st.integers(0, 1), tokens=SEQUENCES, chunk=st.integers(1, 9), picture=PICTURES)
    def request(self, which, tokens, chunk, picture):
        """A prompt is looked up, computed in chunks that are published, and forgotten."""
        spans = spans_of(tokens, picture)
        hit = self._look_up(which, tokens, spans)
        for start in range(hit.num_tokens, len(tokens), chunk):
            stop = min(len(tokens), start + chunk)
            feed(hit.caches, tokens, start, stop, spans)
            self._publish(which, tokens, hit.caches, stop, spans)
        hit.release()

    @rule(which=st.integers(0, 1), tokens=SEQUENCES, every=st.integers(1, 22))
    def decode(self, which, tokens, every):
        """Token by token, published now and then, from caches whose ring has turned."""
        caches = self.fresh()
        for position in range(len(tokens)):
            feed(caches, tokens, position, position + 1)
            if (position + 1) % every == 0 or position + 1 == len(tokens):
                self._publish(which, tokens, caches, position + 1, ())

    @rule(target=hits, which=st.integers(0, 1), tokens=SEQUENCES)
    def hold(self, which, tokens):
        return self._look_up(which, tokens, ())

    @rule(hit=consumes(hits))
    def release(self, hit):
        hit.release()
        hit.release()

    @rule(which=st.integers(0, 1), tokens=SEQUENCES)
    def adopt(self, which, tokens):
        """Everything that was ever offered to the store comes back, in the order it went."""
        self.caches[which].adopt(tokens, self.shelves[which].records)

    @rule(action=st.sampled_from(["shrink", "shrink", "to zero", "to little", "to plenty", "clear"]))
    def press(self, action):
        """Memory is taken from a third side."""
        self.kept_everything = False
        if action == "clear":
            self.published[0] = []
            self.shelves[0].records = []
            self.caches[0].clear()
        elif action == "shrink":
            self.tier.shrink(200)
        else:
            self.tier.resize({"to zero": 0, "to little": 300, "to plenty": PLENTY}[action])

    @rule(tokens=SEQUENCES, picture=PICTURES)
    def look(self, tokens, picture):
        for which in (0, 1):
            self._look_up(which, tokens, spans_of(tokens, picture)).release()

    @invariant()
    def all_adds_up(self):
        for cache in self.caches:
            cache.check()

    def _publish(self, which, tokens, caches, stop, spans):
        self.caches[which].checkpoint(tokens, caches, stop, spans)
        self.published[which].append((tokens, spans, stop))

    def _look_up(self, which, tokens, spans):
        hit = self.caches[which].lookup(tokens, spans)
        assert_restored(hit.caches, tokens, hit.num_tokens, spans)
        assert hit.num_tokens == outside(hit.num_tokens, spans)
        best = self._best(which, tokens, spans)
        # What is evicted or overwritten may be missing; what was never published may not be there.
        assert hit.num_tokens <= best
        if self.kept_everything and self.layout in {"full", "recurrent"}:
            assert hit.num_tokens == best
        assert self.caches[which].explain(tokens, spans).usable_tokens == hit.num_tokens
        return hit

    def _best(self, which, tokens, spans):
        limit = len(tokens) - 1
        if self.layout in {"hybrid", "recurrent"}:
            checkpoints = [
                stop
                for stored, media, stop in self.published[which]
                if stop <= min(limit, common((stored[:stop], media), (tokens, spans))) and outside(stop, spans) == stop
            ]
            return max(checkpoints, default=0)
        runs = [common((stored[:stop], media), (tokens, spans)) for stored, media, stop in self.published[which]]
        return max((outside(min(limit, run), spans) for run in runs), default=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_history_restores_what_was_published_and_nothing_else(layout):
    machine = type(f"Requests_{layout}", (Requests,), {"layout": layout})
    always_the_same = settings(
        max_examples=EXAMPLES,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(machine, settings=always_the_same)
