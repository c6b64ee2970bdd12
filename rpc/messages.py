"""The shape of a conversation: OpenAI's chat messages, tools and tool choice, checked and handed on as they came.

Stateless. The values that reach the engine are the client's own objects, because chat templates read fields of their
own (`reasoning_content`, `name`); these structs only say which shapes are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from omlxd.engine.api import InvalidParams, Json

Name = Annotated[str, Meta(min_length=1)]


class TextPart(Struct, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class ImageUrl(Struct):
    """A picture's `data:` URL, base64, path or address; docs/images.md says which are taken. `detail` does nothing."""

    url: Name
    detail: str | None = None


class ImagePart(Struct, tag_field="type", tag="image_url"):
    """A picture."""

    image_url: ImageUrl


Parts = Annotated[list[TextPart | ImagePart], Meta(min_length=1)]


class FunctionCall(Struct):
    """`arguments` is JSON in a string, as the model wrote it."""

    name: Name
    arguments: str


class ToolCall(Struct):
    """A call that an earlier answer made."""

    type: Literal["function"]
    id: Name
    function: FunctionCall


class SystemMessage(Struct, tag_field="role", tag="system"):
    """How the model is to behave."""

    content: str | Parts
    name: str | None = None


class DeveloperMessage(Struct, tag_field="role", tag="developer"):
    """The same, under its newer name."""

    content: str | Parts
    name: str | None = None


class UserMessage(Struct, tag_field="role", tag="user"):
    """What the person says."""

    content: str | Parts
    name: str | None = None


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    """`content` may be null or absent: an answer may have been tool calls or reasoning alone."""

    content: str | Parts | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None


class ToolMessage(Struct, tag_field="role", tag="tool"):
    """What a tool gave back for the call of that id."""

    content: str | Parts
    tool_call_id: Name


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionSpec(Struct):
    """A function that may be called; `parameters` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionSpec


class FunctionName(Struct):
    """A function by its name."""

    name: Name


class ToolByName(Struct):
    """A `tool_choice` that leaves no choice."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | ToolByName

# By parameter: what `checked_...` holds it to, for the OpenRPC document.
SHAPES: Final[Mapping[str, Any]] = {
    "messages": Annotated[list[Message], Meta(min_length=1)],
    "tools": list[Tool],
    "tool_choice": ToolChoice,
}


def checked_messages(messages: Sequence[Mapping[str, Json]]) -> Sequence[Mapping[str, Json]]:
    """`messages` itself. Raises InvalidParams that names the first message of another shape."""
    _check("messages", messages, Message)
    return messages


def checked_tools(tools: Sequence[Mapping[str, Json]]) -> Sequence[Mapping[str, Json]]:
    """`tools` itself. Raises InvalidParams that names the first tool of another shape."""
    _check("tools", tools, Tool)
    return tools


def checked_tool_choice(choice: Json) -> Json:
    """`choice` itself. Raises InvalidParams."""
    try:
        msgspec.convert(choice, ToolChoice | None)
    except msgspec.ValidationError as exc:
        raise InvalidParams(
            "tool_choice", f"{exc}; takes none, auto, required or {{type: function, function: {{name}}}}"
        ) from None
    return choice


def _check(field: str, items: Sequence[object], shape: Any) -> None:
    for index, item in enumerate(items):
        try:
            msgspec.convert(item, shape)
        except msgspec.ValidationError as exc:
            raise InvalidParams(f"{field}[{index}]", str(exc)) from None
