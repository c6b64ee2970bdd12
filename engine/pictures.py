"""A conversation's pictures: found in its messages, read and decoded in their order, together within the policy.

`Pictures` is owned by the backend and shared by all engines. It reads on threads of its own: a photograph takes long to
decode and the web longer to answer, and neither the event loop nor a model's other prompts should wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from omlxd.engine.api import ChatPrompt, InvalidParams, Json, Prompt
from omlxd.engine.guard import PROCESS, MemoryGuard
from omlxd.engine.image_policy import ImagePolicy, PictureError
from omlxd.engine.ledger import Reservation

if TYPE_CHECKING:
    from omlxd.engine.images import Opened, Picture

Messages = Sequence[Mapping[str, Json]]
_LEGIBLE = 40  # characters of a picture's source
_THREADS = 2  # each may hold the largest picture's pixels a few times over
_PIXEL_BYTES = 4  # of a decoded RGB picture, in Pillow
_WORK_BYTES = 16  # of a pixel besides, while it is decoded, turned and hashed; a WebP takes that much, others half
# What a processor takes at its peak for each pixel that it leaves a picture, and the most that one leaves (Qwen2-VL).
_PROCESSOR_BYTES, _PROCESSOR_PIXELS = 66, 12_845_056


class Named(NamedTuple):
    """A picture as a message names it; `place` is the field of the parameters that does."""

    place: str
    source: str


def named_pictures(messages: Messages) -> list[Named]:
    """The pictures of a conversation in the order in which a template shows them."""
    return list(_named(messages))


def _named(messages: Messages) -> Iterator[Named]:
    for number, message in enumerate(messages):
        content = message.get("content")
        for position, part in enumerate(content if isinstance(content, list | tuple) else ()):
            match part:
                case {"type": "image_url", "image_url": {"url": str(source)}}:
                    yield Named(f"messages[{number}].content[{position}].image_url.url", source)


def legible(prompt: Prompt) -> Prompt:
    """The prompt for people to read: of a picture that is in it, only how it begins and how long it is."""
    if not isinstance(prompt, ChatPrompt) or not named_pictures(prompt.messages):
        return prompt
    return replace(prompt, messages=[_legible(message) for message in prompt.messages])


def _legible(message: Mapping[str, Json]) -> Mapping[str, Json]:
    content = message.get("content")
    return {**message, "content": [_brief(part) for part in content]} if isinstance(content, list | tuple) else message


def _brief(part: Json) -> Json:
    match part:
        case {"type": "image_url", "image_url": {"url": str(source)}} if len(source) > _LEGIBLE:
            return {"type": "image_url", "image_url": {"url": f"{source[:_LEGIBLE]}... ({len(source)} characters)"}}
    return part


def open_pictures(messages: Messages, policy: ImagePolicy) -> list[tuple[str, Opened]]:
    """Each picture's place and header. Blocks; no pixels are decoded before the sizes of all are known and allowed.

    Raises InvalidParams naming the picture's place, and Unsupported for a source that the policy forbids.
    """
    from omlxd.engine.images import open_picture  # brings Pillow in, which a conversation without pictures needs not

    named = named_pictures(messages)
    if len(named) > policy.max_pictures:
        reason = f"{len(named)} pictures; the most in one request is {policy.max_pictures}, leave the oldest out"
        raise InvalidParams("messages", reason)
    opened: list[tuple[str, Opened]] = []
    for place, source in named:
        with _naming(place):
            opened.append((place, open_picture(source, policy)))
        total = _pixels(opened)
        if total > policy.max_total_pixels:
            reason = (
                f"brings the pictures to {total} pixels; the most in one request is {policy.max_total_pixels}, "
                "four times images.max_pixels: scale them down or send fewer"
            )
            raise InvalidParams(place, reason)
    return opened


def decode_pictures(opened: list[tuple[str, Opened]]) -> Sequence[Picture]:
    """Decodes them, and empties the list meanwhile: one file's pixels at a time are there twice. Blocks.

    Raises InvalidParams.
    """
    decoded = []
    while opened:
        place, picture = opened.pop(0)
        with _naming(place):
            decoded.append(picture.decoded())
    return decoded


@contextmanager
def _naming(place: str) -> Iterator[None]:
    try:
        yield
    except PictureError as exc:
        raise InvalidParams(place, exc.reason) from None


def _pixels(opened: Sequence[tuple[str, Opened]]) -> int:
    return sum(picture.num_pixels for _, picture in opened)


def decoding_bytes(opened: Sequence[tuple[str, Opened]]) -> int:
    """What decoded pictures take together, and the more costly of decoding the largest and of processing all."""
    sizes = [picture.num_pixels for _, picture in opened]
    processing = _PROCESSOR_BYTES * sum(min(size, _PROCESSOR_PIXELS) for size in sizes)
    return _PIXEL_BYTES * sum(sizes) + max(_WORK_BYTES * max(sizes, default=0), processing)


class Pictures:
    """Reads conversations' pictures under one policy, within the memory that the guard allows."""

    def __init__(self, policy: ImagePolicy, guard: MemoryGuard) -> None:
        self._policy = policy
        self._guard = guard
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pictures")

    def set_policy(self, policy: ImagePolicy) -> None:
        """For conversations that come from now on. On the event loop."""
        self._policy = policy

    @asynccontextmanager
    async def shown(self, prompt: Prompt) -> AsyncIterator[Sequence[Picture]]:
        """The pictures of a conversation in their order; they are in the ledger until the block is left.

        Raises as `open_pictures` and `decode_pictures` do, and MemoryExceeded.
        """
        if not isinstance(prompt, ChatPrompt) or not named_pictures(prompt.messages):
            yield ()
            return
        loop = asyncio.get_running_loop()
        opened = await loop.run_in_executor(self._threads, open_pictures, prompt.messages, self._policy)
        reservation = self._reserve(decoding_bytes(opened))
        decoding = self._threads.submit(decode_pictures, opened)
        try:
            yield await asyncio.wrap_future(decoding)
        finally:
            # A request that was cancelled leaves a thread that still decodes.
            decoding.add_done_callback(lambda _: reservation.release())

    def _reserve(self, nbytes: int) -> Reservation:
        what, advice = "reading the pictures", "send smaller ones or fewer"
        refusal = self._guard.refusal(what, nbytes, advice=advice)
        if refusal is not None:
            raise refusal
        reservation = self._guard.reserve(PROCESS, "pictures", nbytes)
        if reservation is None:
            self._guard.want_room(nbytes)
            reservation = self._guard.reserve(PROCESS, "pictures", nbytes)
        if reservation is None:
            raise self._guard.gave_up(what, nbytes, advice=f"{advice}, or send the request again")
        return reservation

    def close(self) -> None:
        """Waits for nobody: what is still being read is dropped when it is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)
