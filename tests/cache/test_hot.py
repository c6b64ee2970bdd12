"""The hot tier: one budget, exact numbers, least recently used leaves first, across all models and threads."""

from __future__ import annotations

import gc
import threading

import mlx.core as mx
import pytest

from omlxd.cache.children import Children
from omlxd.cache.entries import Block, Checkpoint
from omlxd.cache.errors import CacheInvariantError
from omlxd.cache.hot import HotTier
from omlxd.cache.keys import chain, pack
from tests.cache.running import PLENTY
from tests.cache.synthetic import feed, full, hybrid, new_cache, windowed

BLOCK = 4
# A block of 4 tokens of one full leaf: keys and values of one float32 each, and 4 bytes for each token id.
BLOCK_BYTES = BLOCK * (2 * 4 + 4)


def published(cache, tokens):
    """Computes and publishes a prompt; returns how many of its tokens are stored."""
    hit = cache.lookup(tokens)
    feed(hit.caches, tokens, hit.num_tokens, len(tokens))
    cache.checkpoint(tokens, hit.caches, len(tokens))
    hit.release()
    cache.check()
    return stored(cache, tokens)


def stored(cache, tokens):
    return cache.match_length([*tokens, 999])


def run(first, blocks):
    """A prompt of whole blocks that shares nothing with one of another `first`."""
    return [first + n for n in range(blocks * BLOCK)]


def test_bytes_are_those_of_the_arrays_and_the_token_ids():
    tier = HotTier(PLENTY)
    cache = new_cache(full(), tier)
    published(cache, run(0, 3))
    assert tier.stats().used_bytes == 3 * BLOCK_BYTES == cache.stats().nbytes
    published(cache, [*run(0, 3)[:10], 77])  # two blocks shared, one partial of three tokens
    assert tier.stats().used_bytes == 3 * BLOCK_BYTES + 3 * BLOCK_BYTES // 4


def test_a_partial_block_gives_way_to_the_one_that_contains_it():
    tier = HotTier(PLENTY)
    cache = new_cache(full(), tier)
    tokens = run(0, 2)
    for stop in (2, 5, 6, 8):
        published(cache, tokens[:stop])
        assert tier.stats().used_bytes == stop * BLOCK_BYTES // BLOCK
    assert cache.stats().blocks == 2


def test_a_full_budget_evicts_the_least_recently_used_leaves():
    """CASES PC-29: a budget of 6 blocks, p has 5 and q 3; p loses its last two, and what is kept can be hit."""
    tier = HotTier(6 * BLOCK_BYTES)
    cache = new_cache(full(), tier)
    p, q = run(0, 5), run(100, 3)
    assert published(cache, p) == 20
    assert published(cache, q) == 12
    assert stored(cache, p) == 12
    assert tier.stats().used_bytes == 6 * BLOCK_BYTES
    assert tier.stats().evicted == 2


def test_use_counts_as_much_as_publishing():
    tier = HotTier(4 * BLOCK_BYTES)
    cache = new_cache(full(), tier)
    p, q = run(0, 2), run(100, 2)
    published(cache, p)
    published(cache, q)
    cache.lookup([*p, 999]).release()
    published(cache, run(200, 1))
    assert (stored(cache, p), stored(cache, q)) == (8, 4)


def test_models_share_the_budget_by_recency():
    tier = HotTier(4 * BLOCK_BYTES)
    one, other = (new_cache(full(), tier, root=root) for root in (b"one", b"other"))
    p = run(0, 3)
    published(one, p)
    published(other, p)
    assert (stored(one, p), stored(other, p)) == (4, 12)
    assert one.stats().nbytes + other.stats().nbytes == tier.stats().used_bytes == 4 * BLOCK_BYTES
    one.check()


def test_what_a_live_request_uses_stays_until_it_is_released():
    tier = HotTier(3 * BLOCK_BYTES)
    cache = new_cache(full(), tier)
    p = run(0, 3)
    published(cache, p)
    hit = cache.lookup([*p, 999])
    assert tier.stats().pinned_bytes == 3 * BLOCK_BYTES
    assert published(cache, run(100, 1)) == 0  # no room, and no error
    assert cache.stats().refused == 1
    tier.resize(0)
    assert stored(cache, p) == 12
    assert tier.stats().free_bytes == -3 * BLOCK_BYTES
    hit.release()
    assert tier.stats().used_bytes == 0
    cache.check()


def test_a_tier_of_zero_bytes_stores_nothing_and_every_request_works():
    tier = HotTier(0)
    for layout in (full, windowed, hybrid):
        cache = new_cache(layout(), tier)
        assert published(cache, run(0, 3)) == 0
        assert cache.stats().blocks == 0


def test_shrinking_in_steps_frees_what_it_says():
    tier = HotTier(PLENTY)
    cache = new_cache(full(), tier)
    p = run(0, 4)
    published(cache, p)
    assert tier.shrink(BLOCK_BYTES + 1) == 2 * BLOCK_BYTES  # whole blocks
    assert stored(cache, p) == 8
    assert tier.shrink(0) == 0
    assert tier.shrink(PLENTY) == 2 * BLOCK_BYTES
    assert published(cache, p) == 16  # the budget is as it was


def test_evicted_arrays_are_really_returned():
    """Also those of blocks that were used often: nothing inside remembers an entry that has gone."""
    tier = HotTier(PLENTY)
    cache = new_cache(full(), tier, block=4096)
    gc.collect()
    before = mx.get_active_memory()
    tokens = list(range(4096))
    published(cache, tokens)
    for _ in range(5):
        cache.lookup([*tokens, 1]).release()
    assert mx.get_active_memory() >= before + 4096 * 8
    tier.shrink(PLENTY)
    assert mx.get_active_memory() < before + 4096


def test_checkpoints_are_evicted_before_the_blocks_they_hang_on():
    tier = HotTier(PLENTY)
    cache = new_cache(hybrid(), tier)
    published(cache, run(0, 1))
    assert (cache.stats().blocks, cache.stats().checkpoints) == (1, 1)
    tier.shrink(1)
    assert (cache.stats().blocks, cache.stats().checkpoints) == (1, 0)
    cache.check()


def test_a_hit_may_be_released_twice_and_an_entry_may_not():
    tier = HotTier(PLENTY)
    cache = new_cache(full(), tier)
    published(cache, run(0, 1))
    hit = cache.lookup([*run(0, 1), 999])
    hit.release()
    hit.release()
    assert tier.stats().pinned_bytes == 0
    with tier.lock, pytest.raises(CacheInvariantError, match="more often"):
        tier.unpin_locked(Checkpoint(Block(chain(b"", pack([1]), (), 4)[0], None, Children()), 0, (), 0))


def test_three_threads_share_a_tier_that_is_too_small():
    """Two engines publish and restore, a third thread shrinks: no deadlock, no lost byte, no wrong row."""
    tier = HotTier(12 * BLOCK_BYTES)
    failures: list[BaseException] = []
    done = threading.Event()

    def engine(root: bytes) -> None:
        try:
            cache = new_cache(full(), tier, root=root)
            for n in range(120):
                published_and_checked(cache, run(n % 7 * 100, 1 + n % 6))
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failures.append(error)

    def published_and_checked(cache, tokens):
        hit = cache.lookup(tokens)
        feed(hit.caches, tokens, hit.num_tokens, len(tokens))
        cache.publish(tokens, hit.caches, len(tokens))
        hit.release()

    def enforcer() -> None:
        while not done.is_set():
            tier.shrink(BLOCK_BYTES)
            tier.check()

    threads = [threading.Thread(target=engine, args=(root,), daemon=True) for root in (b"one", b"other")]
    watcher = threading.Thread(target=enforcer, daemon=True)
    for thread in [*threads, watcher]:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    done.set()
    watcher.join(timeout=60)
    assert not failures
    assert not any(thread.is_alive() for thread in [*threads, watcher])
    tier.check()
    assert tier.stats().pinned_bytes == 0


class Answers:
    """A store that has what it says, and says so when it is told to."""

    def __init__(self):
        self.offers = []

    def offer(self, offer):
        self.offers.append(offer)

    def takes(self, nbytes):
        return True

    def missed(self, names):
        raise AssertionError("it takes everything")

    def used(self, keys):
        """It forgets nothing, whatever is used."""


def test_under_pressure_what_is_on_disk_goes_before_what_is_not():
    tier, store = HotTier(PLENTY), Answers()
    cache = new_cache(full(), tier, store=store)
    p, q = run(0, 3), run(100, 3)
    published(cache, p)
    published(cache, q)
    for offer in store.offers:
        offer.tell(offer.record.spec.tokens >= pack([100]))  # q, which was used last, is on disk
    assert tier.shrink(4 * BLOCK_BYTES) == 4 * BLOCK_BYTES
    tier.check()
    assert (stored(cache, p), stored(cache, q)) == (8, 0)
    assert tier.resize(BLOCK_BYTES) == BLOCK_BYTES
    tier.check()
    assert stored(cache, p) == 4


def test_what_waits_for_the_disk_is_counted_until_it_is_answered():
    tier, store = HotTier(PLENTY), Answers()
    cache = new_cache(full(), tier, store=store)
    published(cache, run(0, 3))
    assert tier.stats().offered_bytes == 3 * BLOCK_BYTES
    store.offers[0].tell(True)
    assert tier.stats().offered_bytes == 2 * BLOCK_BYTES
    tier.shrink(1)  # the last block: only the store's queue has it now
    assert tier.stats().offered_bytes == BLOCK_BYTES
    tier.check()
    for offer in store.offers[1:]:
        offer.tell(False)
    assert tier.stats().offered_bytes == 0
    tier.check()


def test_what_has_no_room_is_offered_all_the_same_and_once():
    tier, store = HotTier(2 * BLOCK_BYTES), Answers()
    cache = new_cache(full(), tier, store=store)
    tokens, since = run(0, 5), 0
    hit = cache.lookup(tokens)
    for stop in (4, 10, 20):
        feed(hit.caches, tokens, since, stop)
        cache.publish(tokens, hit.caches, stop, since=since)
        since = stop
    hit.release()
    assert [(offer.record.spec.start, offer.record.spec.stop) for offer in store.offers] == [
        (0, 4),
        (4, 8),
        (8, 10),
        (8, 12),
        (12, 16),
        (16, 20),
    ]
    assert stored(cache, tokens) == 8
    cache.check()


def test_what_is_restored_beyond_the_budget_goes_when_it_is_let_go():
    tier, store = HotTier(PLENTY), Answers()
    tokens = run(0, 4)
    published(new_cache(full(), tier, store=store), tokens)
    tier = HotTier(2 * BLOCK_BYTES)
    cache = new_cache(full(), tier)
    restoration = cache.restoration([*tokens, 999])
    fits = [restoration.add(offer.record, on_disk=True) for offer in store.offers[:3]]
    assert fits == [True, True, False]
    assert all(restoration.add(offer.record, beyond_budget=True) for offer in store.offers)
    assert tier.stats().free_bytes == -2 * BLOCK_BYTES
    tier.check()
    hit = cache.lookup([*tokens, 999])
    assert hit.num_tokens == 16
    restoration.release()
    assert tier.stats().free_bytes == 0
    assert stored(cache, tokens) == 8
    hit.release()
    cache.check()
