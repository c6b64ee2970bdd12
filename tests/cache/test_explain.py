"""A miss can be explained: what is stored, where it differs, and why what is stored could not be used."""

from __future__ import annotations

from omlxd.cache.hot import HotTier
from omlxd.cache.keys import MediaSpan
from tests.cache.running import PLENTY
from tests.cache.synthetic import feed, full, hybrid, new_cache, windowed

STORED = list(range(100, 130))


def filled(layout, *, steps=(30,), media=(), chunk=None):
    cache = new_cache(layout(), HotTier(PLENTY))
    hit = cache.lookup(STORED, media)
    start = 0
    for stop in steps:
        for first in range(start, stop, chunk or stop):
            feed(hit.caches, STORED, first, min(stop, first + (chunk or stop)), media)
        cache.checkpoint(STORED, hit.caches, stop, media)
        start = stop
    hit.release()
    return cache


def test_nothing_is_stored():
    answer = new_cache(full(), HotTier(PLENTY)).explain([1, 2, 3])
    assert (answer.reason, answer.usable_tokens, answer.stored_tokens) == ("nothing_stored", 0, 0)
    assert answer.asked == (1, 2, 3)


def test_all_but_the_token_that_is_always_computed_is_used():
    answer = filled(full).explain(STORED)
    assert (answer.reason, answer.usable_tokens, answer.prompt_tokens) == ("complete", 29, 30)


def test_the_first_token_that_differs_is_shown_with_both_sides():
    answer = filled(full).explain([*STORED[:10], 7, 8, *STORED[12:]])
    assert (answer.reason, answer.usable_tokens, answer.stored_tokens) == ("diverges", 10, 10)
    assert answer.before == tuple(STORED[:10])
    assert answer.asked[:3] == (7, 8, STORED[12])
    assert answer.stored == (STORED[10], STORED[11])  # as far as that block goes


def test_the_stored_sequence_is_shorter():
    answer = filled(full).explain([*STORED, 1, 2, 3])
    assert (answer.reason, answer.usable_tokens, answer.stored, answer.asked) == ("ends", 30, (), (1, 2, 3))


def test_tokens_beyond_the_last_checkpoint_are_stored_and_not_usable():
    answer = filled(hybrid, steps=(12, 30)).explain([*STORED[:20], 1, 2])
    assert (answer.reason, answer.usable_tokens, answer.stored_tokens) == ("no_checkpoint", 12, 20)


def test_tokens_whose_window_was_overwritten_are_stored_and_not_usable():
    answer = filled(windowed, chunk=1).explain([*STORED[:20], 1, 2])
    assert (answer.reason, answer.usable_tokens, answer.stored_tokens) == ("window_gone", 0, 20)


def test_a_prompt_that_ends_in_a_picture_goes_back_to_its_start():
    picture = (MediaSpan(5, 12, b"red"),)
    answer = filled(full, media=picture).explain(STORED[:9], picture)
    assert (answer.reason, answer.usable_tokens, answer.stored_tokens) == ("inside_media", 5, 9)
