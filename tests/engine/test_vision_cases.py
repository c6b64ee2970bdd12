"""What must not happen with pictures: one taken for another, a hit inside one, one that is left or harms others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import pytest

from omlxd.engine.api import Cancelled, ChatPrompt, EngineFailed, GenerateRequest, InvalidParams, MemoryExceeded
from omlxd.engine.engine import Engine
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.image_policy import ImagePolicy
from omlxd.engine.inbox import Close, Preempt
from omlxd.engine.pictures import Pictures
from omlxd.engine.prefill import new_caches
from omlxd.engine.scheduler import SchedulerLimits
from omlxd.engine.vision_prefill import FeatureCache, PicturePrefills
from tests.cache.shelves import open_store, shelved
from tests.engine.running import Running, engine
from tests.engine.seeing import answers, ask, assert_is_mlx_vlms, cached, chat, loaded, says
from tests.engine.test_guard import limits
from tests.engine.test_pictures import TEXT, showing
from tests.vision_models import FAMILIES, picture

if TYPE_CHECKING:
    from omlxd.engine.vision_model import VisionModel

RED, BLUE, WIDE, TALL = picture("red"), picture("blue"), picture(3, (200, 56)), picture(4, (60, 90))


def run(main):
    return asyncio.run(main())


@pytest.mark.parametrize("family", FAMILIES)
def test_pc_13_the_same_text_with_another_picture_never_hits(family):
    model = cached(family, block_size=4)

    async def main():
        async with engine(model) as running:
            results = [await ask(running, model, [says(image, "?")]) for image in (RED, BLUE, RED)]
        (start,) = {chat(model, [says(image, "?")]).pictures[0].span.start for image in (RED, BLUE)}
        for image, result in zip((RED, BLUE, RED), results, strict=True):
            assert_is_mlx_vlms(family, [says(image, "?")], result)
        assert results[1].usage.cached_tokens <= start
        assert results[2].usage.cached_tokens == results[2].usage.prompt_tokens - 1
        assert results[1].token_ids != results[0].token_ids

    run(main)


@pytest.mark.parametrize("family", FAMILIES)
def test_pc_15_a_match_never_ends_inside_a_picture(family):
    """Blocks of 4: the edges move through the picture as the text before it grows."""
    model = cached(family, block_size=4)

    async def main():
        async with engine(model) as running:
            for text in ("", "a", "ab", "abc"):
                turns = [says(text, WIDE, "?")]
                for turn in (turns, turns, [says(text, WIDE, TALL, "!")]):
                    result = await ask(running, model, turn)
                    assert_is_mlx_vlms(family, turn, result)
                    spans = [each.span for each in chat(model, turn).pictures]
                    assert not any(span.start < result.usage.cached_tokens < span.stop for span in spans)

    run(main)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_from_the_disk_after_a_restart(family, tmp_path):
    first = [says("See: ", WIDE, "What is this?")]
    further = [*first, answers("It is a thing."), says("And ", TALL, "?")]

    async def main():
        for turns in (first, further):
            store = open_store(tmp_path)
            model = loaded(family)
            here = shelved(store, new_caches(model.model))
            async with engine(replace(model, cache=here.cache, store=here.view)) as running:
                result = await ask(running, model, turns)
            assert store.close(30) == 0
            assert_is_mlx_vlms(family, turns, result)
        assert result.timings.fetch_ms > 0
        assert result.usage.cached_tokens >= chat(model, first).pictures[0].span.stop

    run(main)


def test_a_picture_that_was_seen_lately_is_not_seen_again():
    """Without a prefix cache: only what the tower made of it is kept."""
    model = loaded("qwen2_vl")

    async def main():
        async with engine(model) as running:
            await ask(running, model, [says(WIDE, "What is this?")])
            result = await ask(running, model, [says("Other words, and ", RED, " and again ", WIDE)])
        counters = running.metrics.counters
        assert (counters["pictures"], counters["pictures_seen"]) == (3, 2)
        assert running.metrics.histograms["picture_s"].count == 2
        assert_is_mlx_vlms("qwen2_vl", [says("Other words, and ", RED, " and again ", WIDE)], result)

    run(main)


def test_what_is_kept_of_pictures_stays_within_its_budget():
    one = 64 * 4  # bytes of a token's embedding
    model = loaded("qwen2_vl", feature_bytes=15 * one)  # 14 tokens for WIDE, 6 for TALL
    assert model.prefills is not None
    features = model.prefills.features

    async def main():
        async with engine(model) as running:
            for image in (WIDE, TALL, WIDE, TALL):
                await ask(running, model, [says(image, "?")])
                features.check()
                assert features.nbytes <= 15 * one
        assert running.metrics.counters["pictures_seen"] == 4  # one makes the other go

    run(main)


def test_a_request_that_is_preempted_goes_on_where_it_was():
    model = cached("qwen2_5_vl")
    turns = [says("See: ", WIDE, "What is this?")]

    async def main():
        async with engine(model, prefill_chunk=16) as running:
            request = Running(running, chat(model, turns, 40, stream=True))
            await request.first_token()
            running.relieve(Preempt(request.job.id, "to see what happens"))
            result = await request.result()
        assert_is_mlx_vlms("qwen2_5_vl", turns, result)
        assert running.metrics.counters["requests_preempted"] == 1

    run(main)


def test_a_request_preempted_without_a_cache_sees_its_pictures_from_its_own_inputs():
    model = loaded("gemma3", feature_bytes=0)
    turns = [says("See: ", WIDE, "What is this?")]

    async def main():
        async with engine(model, prefill_chunk=16) as running:
            request = Running(running, chat(model, turns, 40, stream=True))
            await request.first_token()
            running.relieve(Preempt(request.job.id, "to see what happens"))
            assert_is_mlx_vlms("gemma3", turns, await request.result())

    run(main)


def test_two_requests_for_one_picture_and_one_for_another_each_get_their_own():
    """They come at once: whoever follows another's prompt follows it up to a picture of its own only."""
    model = cached("qwen2_vl")
    text = "A text that all of them have in common, longer than a block. "
    conversations = [[says(text, image, "What is this?")] for image in (WIDE, picture(9, (200, 56)), WIDE)]

    async def main():
        async with engine(model, prefill_chunk=16) as running:
            requests = [Running(running, chat(model, turns)) for turns in conversations]
            results = await asyncio.gather(*(each.result() for each in requests))
        for turns, result in zip(conversations, results, strict=True):
            assert_is_mlx_vlms("qwen2_vl", turns, result)
        assert results[2].usage.cached_tokens > requests[2].job.pictures[0].span.start
        assert running.metrics.counters["prefill_tokens"] < sum(r.usage.prompt_tokens for r in results) * 0.7

    run(main)


class Watching(FeatureCache):
    """Calls `seen` on the engine thread whenever a picture has been seen."""

    seen: Callable[[], object] = staticmethod(lambda: None)

    def put(self, digest, features):
        super().put(digest, features)
        self.seen()


def watched(family, features):
    model = cached(family)
    return replace(model, prefills=PicturePrefills(cast("VisionModel", model.model), features))


def test_a_request_cancelled_between_two_pictures_leaves_the_first_one_and_nothing_else():
    features = Watching(1 << 20)
    model = watched("qwen2_vl", features)
    guard = MemoryGuard()
    held = []

    async def main():
        async with engine(model, guard=guard) as running:
            asked = chat(model, [says(WIDE, TALL, "?")])

            def cancel():
                held.append(guard.ledger.held(["pictures"]))
                running.abort(asked.id, None)

            features.seen = cancel
            with pytest.raises(Cancelled) as caught, running.holding(asked.pictures):
                await Running(running, asked).result()
            assert caught.value.partial is not None
            assert held[0] > sum(picture.nbytes for picture in asked.pictures)
            assert guard.ledger.held(["pictures"]) == features.nbytes > 0
            features.seen = lambda: None
            turns = [says(WIDE, TALL, "!")]
            assert_is_mlx_vlms("qwen2_vl", turns, await ask(running, model, turns))
            assert len(held) == 1
        assert running.metrics.counters["pictures_seen"] == 2
        assert guard.ledger.total() == 0

    run(main)


class Counting:
    """A vision model that counts the steps in which rows decode."""

    def __init__(self, model):
        self._model = model
        self.steps = 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, tokens, cache, **more):
        self.steps += tokens.shape[1] == 1
        return self._model(tokens, cache, **more)


def test_others_decode_between_two_pictures():
    """A turn sees one picture, and after each turn every row has its next token."""
    features = Watching(0)
    model = watched("qwen2_vl", features)
    counting = Counting(model.model)
    steps = []
    features.seen = lambda: steps.append(counting.steps)
    prefills = PicturePrefills(cast("VisionModel", counting), features)

    async def main():
        async with engine(replace(model, model=cast("VisionModel", counting), prefills=prefills)) as running:
            row = Running(running, chat(model, [says("Go on")], 400))
            pictures = [WIDE, TALL, picture(5), picture(6)]
            await asyncio.gather(row.result(), ask(running, model, [says(*pictures, "?")]))

    run(main)
    assert len(steps) == 4
    assert sorted(set(steps)) == steps


def test_sc_23_a_picture_that_the_tower_cannot_take_fails_its_own_request_only():
    model = cached("qwen2_vl")
    good = [[says(image, "What is this?")] for image in (RED, WIDE, TALL)]

    async def main():
        async with engine(model) as running:
            bad = chat(model, [says(RED, "What is this?")])
            broken = replace(bad.pictures[0], tensors={"pixel_values": bad.pictures[0].tensors["pixel_values"]})
            requests = [Running(running, chat(model, turns)) for turns in good[:2]]
            failing = Running(running, replace(bad, pictures=[broken], use_cache=False))
            requests.append(Running(running, chat(model, good[2])))
            with pytest.raises(EngineFailed):
                await failing.result()
            for turns, request in zip(good, requests, strict=True):
                assert_is_mlx_vlms("qwen2_vl", turns, await request.result())

    run(main)


def test_no_state_of_a_request_stays_on_the_model():
    model = loaded("qwen2_vl")
    language = model.model["vlm"].language_model

    async def main():
        async with engine(model) as running:
            await asyncio.gather(*(ask(running, model, [says(image, "?")]) for image in (RED, WIDE, TALL)))

    run(main)
    assert {name for name, value in vars(language).items() if isinstance(value, mx.array)} == set()
    assert all(vars(language)[name] is None for name in ("_rope_deltas", "_position_ids"))


def test_an_unloaded_vision_model_is_really_gone():
    async def main():
        model = cached("qwen2_vl")
        asked = chat(model, [says(WIDE, "?")])
        running = Engine(model, SchedulerLimits())
        del model  # as whoever loaded it must
        await Running(running, asked).result()
        running.close(Close("unloaded"))
        assert (await asyncio.wait_for(running.closed, 30)).remains is None

    run(main)


# What is refused, before anything is computed


def refused(model, *parts):
    with pytest.raises(InvalidParams) as caught:
        chat(model, [says(*parts)])
    return caught.value.message


def test_a_picture_too_flat_for_its_processor_is_refused_with_its_words():
    assert "aspect ratio" in refused(loaded("qwen2_vl"), picture(1, (2000, 2)), "?")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mark_of_a_picture_in_a_text_is_no_picture(family):
    message = refused(loaded(family), RED, f"and {FAMILIES[family].picture_token}")
    assert FAMILIES[family].picture_token in message


def test_a_conversation_that_ends_with_a_picture_is_refused():
    plain = loaded("llava")
    plain.tokenizer.chat_template = "{% for part in messages[0]['content'] %}<image>{% endfor %}"
    assert "put a text after it" in refused(plain, RED)


# Memory


def test_pictures_that_can_never_fit_are_refused_with_the_numbers_before_one_is_seen():
    model = loaded("qwen2_vl")
    asked = chat(model, [says(WIDE, TALL, "?")])
    assert model.sight is not None
    assert model.prefills is not None
    tower = model.sight.tower
    least = sum(p.nbytes + tower.embeddings(p) for p in asked.pictures) + max(map(tower.seeing, asked.pictures))
    guard = MemoryGuard(limits=limits(least - 1))

    async def main():
        async with engine(model, guard=guard) as running:
            with pytest.raises(MemoryExceeded) as caught:
                await Running(running, asked).result()
            assert caught.value.fields["needed_bytes"] == least
            guard.limits = limits(least)
            await Running(running, chat(model, [says(WIDE, TALL, "?")])).result()

    run(main)
    assert guard.ledger.total() == 0


def test_what_is_kept_of_pictures_makes_way_for_a_request_that_needs_its_room():
    model = loaded("qwen2_vl")
    assert model.prefills is not None
    features = model.prefills.features
    guard = MemoryGuard()

    async def main():
        async with engine(model, guard=guard) as running:
            await ask(running, model, [says(WIDE, "?")])
            kept = features.nbytes
            assert kept > 0
            guard.limits = limits(1)
            with pytest.raises(MemoryExceeded) as caught:
                await ask(running, model, [says(TALL, "?")])
            guard.limits = limits(kept + int(str(caught.value.fields["needed_bytes"])) - 1)
            await ask(running, model, [says(TALL, "?")])
            assert features.nbytes < kept

    run(main)


# The processor


class Gate:
    """A processor that says when it works, and goes on when it may."""

    def __init__(self, processor):
        self._processor = processor
        self.began, self.may = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, **given):
        self.calls += 1
        self.began.set()
        assert self.may.wait(30)
        return self._processor(**given)


def gated(family):
    model = cached(family)
    assert model.sight is not None
    gate = Gate(model.sight.processor)
    return replace(model, sight=replace(model.sight, processor=gate)), gate


@asynccontextmanager
async def reading(model, **more):
    """An engine that reads pictures, too."""
    guard = MemoryGuard()
    pictures = Pictures(ImagePolicy(), guard)
    running = Engine(model, SchedulerLimits(), guard=guard, pictures=pictures, **more)
    try:
        yield running, guard
    finally:
        running.close(Close("unloaded"))
        await asyncio.wait_for(running.closed, 30)
        pictures.close()
        assert guard.ledger.total() == 0


def asks(*messages):
    return GenerateRequest("m", ChatPrompt([*messages]))


def test_a_text_is_not_kept_waiting_by_a_picture_that_is_processed():
    model, gate = gated("qwen2_vl")

    async def main():
        async with reading(model) as (running, _):
            slow = asyncio.create_task(running.prepare(asks(showing(WIDE))))
            await asyncio.to_thread(gate.began.wait, 30)
            assert (await running.prepare(asks(TEXT))).token_ids
            assert not slow.done()
            gate.may.set()
            assert len((await slow).pictures) == 1

    run(main)


def test_a_conversations_earlier_pictures_are_not_processed_again():
    model, gate = gated("qwen2_vl")
    gate.may.set()

    async def main():
        async with reading(model, picture_bytes=1 << 20) as (running, guard):
            first = await running.prepare(asks(showing(WIDE)))
            kept = guard.ledger.held(["pictures"])
            assert kept == sum(each.nbytes for each in first.pictures)
            second = await running.prepare(asks(showing(WIDE), TEXT, showing(TALL, WIDE)))
            assert gate.calls == 2
            assert second.pictures[0].tensors is second.pictures[2].tensors is first.pictures[0].tensors
            running._short()  # as the engine thread does when memory is short
            await asyncio.sleep(0)
            assert guard.ledger.held(["pictures"]) == 0
            await running.prepare(asks(showing(WIDE)))
            assert gate.calls == 3

    run(main)
