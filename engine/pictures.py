"""A conversation's pictures: found in its messages, read and decoded in their order, together within the policy.

`Pictures` is owned by the backend and shared by all engines. It reads on threads of its own: a photograph takes long to
decode and the web longer to answer, and neither the event loop nor a model's other prompts should wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from omlxd.engine.api import ChatPrompt, InvalidParams, Json, Prompt
from omlxd.engine.image_policy import ImagePolicy, PictureError

if TYPE_CHECKING:
    from omlxd.engine.images import Opened, Picture

Messages = Sequence[Mapping[str, Json]]
_LEGIBLE = 40  # characters of a picture's source
_THREADS = 2  # each may hold the largest picture's pixels a few times over


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


def read_pictures(messages: Messages, policy: ImagePolicy) -> list[Picture]:
    """Decodes every picture. Blocks; all sizes are known and allowed before the first picture's pixels are decoded.

    Raises InvalidParams naming the picture's place, and Unsupported for a source that the policy forbids.
    """
    named = named_pictures(messages)
    if len(named) > policy.max_pictures:
        reason = f"{len(named)} pictures; the most in one request is {policy.max_pictures}, leave the oldest out"
        raise InvalidParams("messages", reason)
    opened = _opened(named, policy)
    return [_decoded(place, picture) for (place, _), picture in zip(named, opened, strict=True)]


def _opened(named: Sequence[Named], policy: ImagePolicy) -> list[Opened]:
    from omlxd.engine.images import open_picture  # brings Pillow in, which a conversation without pictures needs not

    opened: list[Opened] = []
    for place, source in named:
        try:
            opened.append(open_picture(source, policy))
        except PictureError as exc:
            raise InvalidParams(place, exc.reason) from None
        total = sum(picture.num_pixels for picture in opened)
        if total > policy.max_total_pixels:
            reason = (
                f"brings the pictures to {total} pixels; the most in one request is {policy.max_total_pixels}, "
                "four times images.max_pixels: scale them down or send fewer"
            )
            raise InvalidParams(place, reason)
    return opened


def _decoded(place: str, picture: Opened) -> Picture:
    try:
        return picture.decoded()
    except PictureError as exc:
        raise InvalidParams(place, exc.reason) from None


class Pictures:
    """Reads conversations' pictures under one policy."""

    def __init__(self, policy: ImagePolicy) -> None:
        self._policy = policy
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pictures")

    def set_policy(self, policy: ImagePolicy) -> None:
        """For conversations that come from now on. On the event loop."""
        self._policy = policy

    async def read(self, messages: Messages) -> Sequence[Picture]:
        """The pictures in their order. Raises InvalidParams and Unsupported, as `read_pictures` does."""
        if not named_pictures(messages):
            return ()
        work = partial(read_pictures, messages, self._policy)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Waits for nobody: what is still being read is dropped when it is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)
