"""Messages: a client's conversation in the shape that chat templates are written for.

Pure functions on the tokenizer thread. Templates read text, arguments as objects and reasoning under one name; clients
send parts, arguments as JSON text and reasoning as it came back to them. Fields that are not known here stay as they
are: a template may read them.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence

from omlxd.engine.api import Json, Unsupported

Message = dict[str, Json]


class PartsStyle(enum.Enum):
    """How a chat template takes a message's content: as text, as parts where pictures are shown, as parts always."""

    NEVER = enum.auto()
    WHERE_SHOWN = enum.auto()
    ALWAYS = enum.auto()


def parts_style(template: str) -> PartsStyle:
    """For a template that shows pictures: whether it asks what a content is before it goes through its parts."""
    return PartsStyle.WHERE_SHOWN if "is string" in template else PartsStyle.ALWAYS


def conversation(
    messages: Sequence[Mapping[str, Json]], *, developer: bool, parts: PartsStyle = PartsStyle.NEVER
) -> list[Message]:
    """The messages for a template; `developer` says that it knows that role, which otherwise speaks as the system.

    Raises Unsupported for images that the template has no place for.
    """
    names = _call_names(messages)
    return [_message(message, names, developer=developer, parts=parts) for message in messages]


def texts_of(messages: Sequence[Mapping[str, Json]]) -> list[str]:
    """What the client wrote, message by message and part by part."""
    contents = [message.get("content") for message in messages]
    plain = [content for content in contents if isinstance(content, str)]
    parts = [part for content in contents for part in _parts(content)]
    return [*plain, *(str(part.get("text")) for part in parts if isinstance(part, Mapping) and "text" in part)]


def _parts(content: Json) -> Sequence[Json]:
    return content if isinstance(content, Sequence) and not isinstance(content, str) else ()


def _is_picture(part: Json) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def _content(content: Json, parts: PartsStyle) -> Json:
    shows = any(_is_picture(part) for part in _parts(content))
    if parts is PartsStyle.NEVER or (parts is PartsStyle.WHERE_SHOWN and not shows):
        return text_of_content(content)
    if not _parts(content):
        return [{"type": "text", "text": text_of_content(content)}]
    return [{"type": "image"} if _is_picture(part) else part for part in _parts(content)]


def _message(message: Mapping[str, Json], names: Mapping[Json, Json], *, developer: bool, parts: PartsStyle) -> Message:
    plain = {**message, "content": _content(message.get("content"), parts)}
    if message.get("role") == "developer" and not developer:
        plain["role"] = "system"
    if message.get("role") == "tool" and "name" not in message and message.get("tool_call_id") in names:
        plain["name"] = names[message["tool_call_id"]]
    if "reasoning" in message and "reasoning_content" not in message:
        plain["reasoning_content"] = message["reasoning"]
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def text_of_content(content: Json) -> str:
    """A message's content as one string: text parts are joined. Raises Unsupported for images."""
    if content is None:
        return ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return "".join(_part_text(part) for part in content)
    return str(content)


def _part_text(part: Json) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise Unsupported("image input", "this model takes text here; send parts of type text")


def _call(call: Json) -> Json:
    """A call with its arguments as the object they are, where they are one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call


def _call_names(messages: Sequence[Mapping[str, Json]]) -> dict[Json, Json]:
    """The function's name for each call's id."""
    names: dict[Json, Json] = {}
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(call, Mapping) and isinstance(function, Mapping) and isinstance(call.get("id"), str):
                names[call["id"]] = function.get("name")
    return names
