"""Conventions: what a model's tokenizer and template say about the text it writes.

Read once per model, on its tokenizer thread: the marks around reasoning, the format of tool calls, the control tokens,
the template's own words. From them and one request comes the `Form` its answer is read by. gpt-oss's channels are known
here; every other family by what mlx-lm's tokenizer wrapper found out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omlxd.engine import tools
from omlxd.engine.channels import Dialect, State, exits_of
from omlxd.engine.fim import FimIds, fim_of
from omlxd.engine.prompt import template_source
from omlxd.engine.thinking import Marks, marks_of
from omlxd.engine.tools import ToolFormat

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# Added tokens that are not declared special and still are no text, as Qwen's <|fim_pad|> and <|file_sep|>.
_CONTROL = re.compile(r"<[|\uff5c].+[|\uff5c]>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
# The states of mlx-lm's response formats.
_STATES = {"normal": State.CONTENT, "reasoning": State.REASONING, "tool": State.TOOL, "header": State.HEADER}

Edges = dict[State, dict[str, State]]


@dataclass(frozen=True, slots=True)
class Conventions:
    """A model's. `plain` reads answers where no tools were offered, `calling` where they were.

    `control_ids` are tokens that stand for no text, `added_ids` all that the tokenizer finds in a text before any rule.
    """

    marks: Marks | None
    tool_format: ToolFormat | None
    control_ids: frozenset[int]
    added_ids: Mapping[str, int]
    template: str
    harmony: bool
    initial: State
    plain: Dialect
    calling: Dialect
    fim: FimIds | None


def conventions_of(tokenizer: TokenizerWrapper) -> Conventions:
    """Reads them; takes as long as going through the vocabulary once."""
    template = template_source(tokenizer)
    vocabulary = tokenizer.get_vocab()
    harmony = all(token in vocabulary for token in _HARMONY)
    marks = None if harmony else marks_of(tokenizer, template)
    format = tools.HARMONY if harmony else _tool_format(tokenizer)
    added = tokenizer.added_tokens_decoder
    return Conventions(
        marks=marks,
        tool_format=format,
        control_ids=frozenset(
            id for id, token in added.items() if token.special or _CONTROL.fullmatch(token.content) is not None
        ),
        added_ids={token.content: id for id, token in added.items()},
        template=template,
        harmony=harmony,
        initial=State.HEADER if harmony else _STATES[tokenizer.response_initial_state or "normal"],
        plain=Dialect(exits_of(_harmony_edges(calls=False) if harmony else _edges(tokenizer, marks, None))),
        calling=Dialect(exits_of(_harmony_edges(calls=True) if harmony else _edges(tokenizer, marks, format))),
        fim=fim_of(tokenizer),
    )


def _tool_format(tokenizer: TokenizerWrapper) -> ToolFormat | None:
    if not tokenizer.has_tool_calling:
        return None
    module = tokenizer.tool_parser.__module__.rpartition(".")[2]
    return tools.known_format(tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.tool_parser, module)


def _edges(tokenizer: TokenizerWrapper, marks: Marks | None, format: ToolFormat | None) -> Edges:
    """As mlx-lm's own state machine has them, and a closing mark without an opening one leads nowhere."""
    edges: Edges = {state: {} for state in State}
    for marker in tokenizer.structural_markers:
        edges[State.CONTENT][marker] = State.CONTENT
    if marks is not None:
        edges[State.CONTENT] |= {marks.start: State.REASONING, marks.end: State.CONTENT}
        edges[State.REASONING] = {marks.start: State.REASONING, marks.end: State.CONTENT}
    for state, exits in tokenizer.response_transitions.items():
        for marker, target in exits:
            if format is not None or target != "tool":
                edges[_STATES[state]][marker] = _STATES[target]
    if format is not None:
        if all(State.TOOL not in targets.values() for targets in edges.values()):
            edges[State.CONTENT][format.start] = State.TOOL
        if marks is not None:
            edges[State.REASONING][format.start] = State.TOOL
        if format.end:
            edges[State.TOOL][format.end] = State.CONTENT
    return edges


def _harmony_edges(*, calls: bool) -> Edges:
    """gpt-oss: every message has a head that names its channel, and may name whom it is for."""
    heads = {
        "<|channel|>analysis<|message|>": State.REASONING,
        "<|channel|>final<|message|>": State.CONTENT,
        "<|channel|>commentary<|message|>": State.CONTENT,
        "<|message|>": State.CONTENT,  # whatever else the head says
    }
    if calls:
        heads[" to="] = State.TOOL
    ends = {"<|end|>": State.HEADER, "<|start|>": State.HEADER}
    switches = {marker: target for marker, target in heads.items() if marker.startswith("<|channel|>")}
    if calls:
        switches |= {"<|channel|>commentary to=": State.TOOL, "<|channel|>analysis to=": State.TOOL}
    return {
        State.HEADER: heads,
        State.REASONING: ends | switches,
        State.CONTENT: ends | switches,
        State.TOOL: {"<|call|>": State.HEADER, "<|end|>": State.HEADER},
    }
