"""Messages: a client's conversation in the shape that chat templates are written for.

Pure functions on the tokenizer thread. Templates read text, arguments as objects and reasoning under one name; clients
send parts, arguments as JSON text and reasoning as it came back to them. Fields that are not known here stay as they
are: a template may read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from omlxd.engine.api import Json, Unsupported

Message = dict[str, Json]


def conversation(messages: Sequence[Mapping[str, Json]], *, developer: bool) -> list[Message]:
    """The messages for a template; `developer` says that it knows that role, which otherwise speaks as the system.

    Raises Unsupported for images.
    """
    names = _call_names(messages)
    return [_message(message, names, developer=developer) for message in messages]


def _message(message: Mapping[str, Json], names: Mapping[Json, Json], *, developer: bool) -> Message:
    plain = {**message, "content": text_of_content(message.get("content"))}
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
    raise Unsupported("image input", "this model takes text; send parts of type text")


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
