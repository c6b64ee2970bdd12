"""Tool calls: how each family of models writes them, and what a client gets of one.

The parsers are mlx-lm's; here is what they leave open: where a closing mark is only text inside a string, whether what
came out is a call of a function that was offered, and how a call begins when the client demands one. A call that
cannot be read is kept as text with the reason; nothing is ever completed or repaired. `Calls` belongs to one request.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omlxd.engine.api import Json, MalformedCall

Tools = Sequence[Mapping[str, Json]]
Parser = Callable[[str, Any], Any]
Quoted = Callable[[str], bool]

# What mlx-lm's parsers raise at text that is no call.
PARSE_FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's way to write a call. `end` is empty where the end of the answer ends the last call.

    `opening` gives the text with which a call of a named function begins, up to its arguments. Where these are one JSON
    object, `tail` is what follows it; elsewhere it is None.
    """

    start: str
    end: str
    parse: Parser
    quoted: Quoted
    opening: Callable[[str], str]
    tail: str | None = None


# ---------------------------------------------------------------------------------------------------------------------
# Inside a string or not


def in_json_string(text: str) -> bool:
    """Whether `text`, JSON so far, ends inside a string."""
    return _in_string(text, '"')


def in_python_string(text: str) -> bool:
    return _in_string(text, "\"'")


def _in_string(text: str, quotes: str) -> bool:
    inside, escaped = "", False
    for char in text:
        if escaped:
            escaped = False
        elif inside and char == "\\":
            escaped = True
        elif inside:
            inside = "" if char == inside else inside
        elif char in quotes:
            inside = char
    return bool(inside)


def _inside(opening: str, closing: str) -> Quoted:
    """Whether a tag has been opened and not closed."""
    return lambda text: text.rfind(opening) > text.rfind(closing)


def _odd(mark: str) -> Quoted:
    """Whether a mark that both opens and closes has been opened."""
    return lambda text: text.count(mark) % 2 == 1


# ---------------------------------------------------------------------------------------------------------------------
# The families


@dataclass(frozen=True, slots=True)
class FamilyForm:
    """What mlx-lm's parser of a family leaves open; see `ToolFormat`."""

    quoted: Quoted
    opening: str  # NAME stands for the function's name
    tail: str | None = None


# By the name of mlx-lm's parser module.
KNOWN: Mapping[str, FamilyForm] = {
    "json_tools": FamilyForm(in_json_string, '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"),
    "mistral": FamilyForm(in_json_string, '[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"),
    "kimi_k2": FamilyForm(
        in_json_string,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "qwen3_coder": FamilyForm(_inside("<parameter=", "</parameter>"), "<tool_call>\n<function=NAME>\n"),
    "minimax_m2": FamilyForm(
        _inside("<parameter name=", "</parameter>"), '<minimax:tool_call>\n<invoke name="NAME">\n'
    ),
    "glm47": FamilyForm(_inside("<arg_value>", "</arg_value>"), "<tool_call>NAME\n"),
    "longcat": FamilyForm(_inside("<longcat_arg_value>", "</longcat_arg_value>"), "<longcat_tool_call>NAME\n"),
    "minicpm5": FamilyForm(_inside("<param ", "</param>"), '<function name="NAME">'),
    "muse_spark": FamilyForm(
        _inside("<atem:parameter", "</atem:parameter>"), '<atem:function_calls>\n<atem:invoke name="NAME">\n'
    ),
    "kimi_k3": FamilyForm(
        _inside("<|open|>argument", "<|close|>argument"),
        '<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>',
    ),
    "pythonic": FamilyForm(in_python_string, "<|tool_call_start|>[NAME("),
    "gemma4": FamilyForm(_odd('<|"|>'), "<|tool_call>call:NAME{"),
    "function_gemma": FamilyForm(_odd("<escape>"), "<start_function_call>call:NAME{"),
}

_HARMONY_CALL = re.compile(
    r"\s*(?:functions\.)?(?P<name>[\w.-]+)\s*(?:<\|channel\|>\s*\w+)?\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>",
)


def _parse_harmony(text: str, _tools: Any = None) -> dict[str, Any]:
    """gpt-oss: the recipient, some words about it, and after the message mark one JSON object."""
    head = _HARMONY_CALL.match(text)
    if head is None:
        raise ValueError("no recipient and message")
    return {"name": head["name"], "arguments": json.loads(text[head.end() :])}


def _harmony_opening(name: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"


HARMONY = ToolFormat(" to=", "<|call|>", _parse_harmony, in_json_string, _harmony_opening, tail="<|call|>")


def known_format(start: str, end: str, parse: Parser, module: str) -> ToolFormat | None:
    """The format of mlx-lm's parser module of that name; None for one that is not known here."""
    form = KNOWN.get(module)
    if form is None:
        return None
    return ToolFormat(start, end, parse, form.quoted, lambda name: form.opening.replace("NAME", name), form.tail)


# ---------------------------------------------------------------------------------------------------------------------
# What an answer's calls come to


class Calls:
    """The calls of one answer, as their text comes in."""

    def __init__(self, format: ToolFormat, tools: Tools) -> None:
        self._format = format
        self._names = {function_of(tool)["name"] for tool in tools}
        self._tools = [_with_parameters(tool) for tool in tools]
        self._start = ""
        self._text: list[str] = []
        self.parsed: list[dict[str, Json]] = []
        self.malformed: list[MalformedCall] = []

    def open(self, marker: str) -> None:
        """A call begins, after this marker."""
        self._start = marker
        self._text.clear()

    def add(self, text: str) -> None:
        self._text.append(text)

    def close(self, marker: str) -> MalformedCall | None:
        """The call has ended with this marker. Returns it if it cannot be read."""
        text = "".join(self._text)
        try:
            calls = self._read(text)
        except PARSE_FAILURES as exc:
            return self._refuse(f"{self._start}{text}{marker}", f"it cannot be read: {exc}")
        for call in calls:
            if call["function"]["name"] not in self._names:
                reason = f"no tool is named {call['function']['name']!r}"
                return self._refuse(f"{self._start}{text}{marker}", reason)
        self.parsed += calls
        return None

    def end(self, *, whole: bool) -> MalformedCall | None:
        """The answer has ended inside a call; `whole` says that this is how such a call ends."""
        if whole:
            return self.close("")
        return self._refuse(self._start + "".join(self._text), "the answer ended before the call did")

    def _refuse(self, text: str, reason: str) -> MalformedCall:
        call = MalformedCall(text, reason)
        self.malformed.append(call)
        return call

    def _read(self, text: str) -> list[dict[str, Any]]:
        found = self._format.parse(text, self._tools)
        calls = found if isinstance(found, list) else [found]
        if not calls:
            raise ValueError("it names no function")
        return [_openai(call) for call in calls]


def _openai(call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's shape. Raises ValueError or TypeError where there is no name, or no object of arguments."""
    name, arguments = call["name"], call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("it has no name with an object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    id = call.get("id")
    return {
        "id": id if isinstance(id, str) else f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def function_of(item: Mapping[str, Json]) -> Mapping[str, Json]:
    """The function in a tool, or in a tool choice: both have it in the same place."""
    function = item.get("function")
    return function if isinstance(function, Mapping) else {"name": ""}


def _with_parameters(tool: Mapping[str, Json]) -> Mapping[str, Json]:
    """With an object of parameters, empty where the client gave none: some parsers take it for granted."""
    function = function_of(tool)
    return {**tool, "function": {**function, "parameters": function.get("parameters") or {"type": "object"}}}
