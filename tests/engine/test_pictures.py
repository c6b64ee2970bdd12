"""A conversation's pictures: which there are, where a refusal points to, and what they may be together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from omlxd.engine.api import ChatPrompt, InvalidParams, MemoryExceeded, TextPrompt, Unsupported
from omlxd.engine.guard import MemoryGuard
from omlxd.engine.image_policy import ImagePolicy
from omlxd.engine.images import Picture, digest_of
from omlxd.engine.limits import UNLIMITED, Ceilings
from omlxd.engine.pictures import Pictures, decode_pictures, decoding_bytes, legible, named_pictures, open_pictures
from tests.engine.test_images import base64_of, data_url, file_of, noise

OPEN = ImagePolicy()


def showing(*images: Image.Image | str) -> dict[str, Any]:
    """A message of the user's that shows these, with a word before each."""
    urls = [image if isinstance(image, str) else data_url(file_of(image)) for image in images]
    parts = [({"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}) for url in urls]
    return {"role": "user", "content": [part for pair in parts for part in pair]}


def read_pictures(messages: list[dict[str, Any]], policy: ImagePolicy = OPEN) -> Sequence[Picture]:
    return decode_pictures(open_pictures(messages, policy))


TEXT = {"role": "user", "content": "only words"}


def refused(messages: list[dict[str, Any]], policy: ImagePolicy = OPEN) -> tuple[str, str]:
    with pytest.raises(InvalidParams) as found:
        read_pictures(messages, policy)
    return str(found.value.fields["field"]), str(found.value.fields["reason"])


def test_pictures_come_in_the_order_of_messages_and_parts() -> None:
    images = [noise(4, 3, seed=seed) for seed in range(3)]
    messages = [TEXT, showing(*images[:2]), {"role": "assistant", "content": None}, showing(images[2])]
    assert [each.digest for each in read_pictures(messages, OPEN)] == [digest_of(image) for image in images]


def test_a_conversation_without_pictures_has_none() -> None:
    assert named_pictures([TEXT, {"role": "assistant", "tool_calls": []}]) == []
    assert read_pictures([TEXT], OPEN) == []


def test_a_refusal_names_the_pictures_place() -> None:
    messages = [TEXT, showing(noise(4, 4), "data:image/png;base64,AAAA")]
    place, reason = refused(messages)
    assert place == "messages[1].content[3].image_url.url"
    assert "no picture" in reason


def test_a_damaged_picture_is_named_too() -> None:
    whole = file_of(noise(64, 64))
    place, reason = refused([showing(base64_of(whole[: len(whole) // 2]))])
    assert place == "messages[0].content[1].image_url.url"
    assert "damaged or cut off" in reason


def test_more_pictures_than_the_most_are_refused_unread() -> None:
    messages = [showing(*["data:,unread"] * 3)]
    assert refused(messages, ImagePolicy(max_pictures=2)) == (
        "messages",
        "3 pictures; the most in one request is 2, leave the oldest out",
    )


def test_together_they_have_at_most_four_times_the_pixels_of_the_largest_one() -> None:
    policy = ImagePolicy(max_pixels=10)
    assert len(read_pictures([showing(*[noise(5, 2)] * 4)], policy)) == 4
    place, reason = refused([showing(*[noise(5, 2)] * 4, noise(1, 1))], policy)
    assert place == "messages[0].content[9].image_url.url"
    assert "41 pixels; the most in one request is 40" in reason


def test_all_sizes_are_looked_at_before_any_pixels() -> None:
    whole = file_of(noise(64, 64))
    cut_off, too_large = base64_of(whole[: len(whole) // 2]), data_url(file_of(noise(65, 64)))
    place, _ = refused([showing(cut_off, too_large)], ImagePolicy(max_pixels=64 * 64))
    assert place == "messages[0].content[3].image_url.url"


def test_a_log_is_told_how_a_picture_begins_and_not_its_bytes() -> None:
    messages = [TEXT, showing(noise(40, 40), "/pictures/a.png")]
    shown = legible(ChatPrompt(messages))
    assert isinstance(shown, ChatPrompt)
    long, short = named_pictures(shown.messages)
    length = len(messages[1]["content"][1]["image_url"]["url"])
    assert long.source.startswith("data:image/png;base64,iVBORw0KGgo")
    assert long.source.endswith(f"... ({length} characters)")
    assert len(long.source) < 80
    assert short.source == "/pictures/a.png"
    assert shown.messages[0] == TEXT
    assert legible(TextPrompt("as it is")) == TextPrompt("as it is")


def test_pictures_are_read_beside_the_loop(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(file_of(noise(4, 4)))
    prompt = ChatPrompt([showing(str(tmp_path / "a.png"))])

    async def read() -> None:
        pictures = Pictures(OPEN, MemoryGuard())
        async with pictures.shown(ChatPrompt([TEXT])) as none:
            assert none == ()
        with pytest.raises(Unsupported, match=r"images\.allow_paths"):
            async with pictures.shown(prompt):
                pass
        pictures.set_policy(ImagePolicy(allow_paths=(str(tmp_path),)))
        async with pictures.shown(prompt) as (picture,):
            assert picture.digest == digest_of(noise(4, 4))
        pictures.close()

    asyncio.run(read())


def limited(limit: int) -> MemoryGuard:
    ceilings = Ceilings(limit, limit)
    return MemoryGuard(limits=replace(UNLIMITED, soft=limit, hard=limit, abort=limit, ceilings=ceilings))


def test_decoded_pictures_are_in_the_ledger_as_long_as_they_are_used() -> None:
    guard = limited(2000)

    async def look() -> None:
        pictures = Pictures(OPEN, guard)
        async with pictures.shown(ChatPrompt([showing(noise(5, 2), noise(2, 2))])):
            assert guard.ledger.total() == (4 + 66) * (10 + 4)
        assert guard.ledger.total() == 0
        with pytest.raises(InvalidParams):
            async with pictures.shown(ChatPrompt([showing("data:image/png;base64,AAAA")])):
                pass
        assert guard.ledger.total() == 0
        pictures.close()

    asyncio.run(look())


def test_a_large_picture_costs_its_decoding_and_not_pixels_that_no_processor_leaves_it() -> None:
    (large,) = open_pictures([showing(Image.new("1", (8000, 5000)))], OPEN)
    assert decoding_bytes([large]) == 4 * 40_000_000 + 66 * 12_845_056


def test_pictures_that_there_is_no_memory_for_are_refused_undecoded() -> None:
    guard = limited(1000)
    whole = file_of(noise(64, 64))
    cut_off = base64_of(whole[: len(whole) // 2])

    async def look() -> None:
        pictures = Pictures(OPEN, guard)
        with pytest.raises(MemoryExceeded, match="reading the pictures needs 286720 bytes"):
            async with pictures.shown(ChatPrompt([showing(cut_off)])):
                pass
        held = guard.ledger.hold("others", "kv", 400)
        with pytest.raises(MemoryExceeded, match="needs 700 bytes, the static limit leaves 600"):
            async with pictures.shown(ChatPrompt([showing(noise(5, 2))])):
                pass
        held.release()
        async with pictures.shown(ChatPrompt([showing(noise(5, 2))])) as shown:
            assert len(shown) == 1
        pictures.close()

    asyncio.run(look())


def test_a_request_that_leaves_while_its_picture_is_decoded_leaves_nothing_in_the_ledger() -> None:
    guard = MemoryGuard()

    async def look(pictures: Pictures) -> None:
        async with pictures.shown(ChatPrompt([showing(noise(700, 700))])):
            await asyncio.Event().wait()

    async def leave() -> None:
        pictures = Pictures(OPEN, guard)
        looking = asyncio.create_task(look(pictures))
        async with asyncio.timeout(30):
            while guard.ledger.total() == 0:
                await asyncio.sleep(0)
            looking.cancel()
            await asyncio.wait([looking])
            while guard.ledger.total() > 0:
                await asyncio.sleep(0)
        assert looking.cancelled()
        pictures.close()

    asyncio.run(leave())
