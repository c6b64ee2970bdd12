"""Reasoning: the marks a model puts around it, whether a prompt left it open, and how its template closes it.

Read once per model from its tokenizer and its chat template; pure functions and values, on the tokenizer thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# Beside those that mlx-lm looks for: Magistral, Command A and Seed-OSS have these as single tokens.
_MORE_MARKS = (
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
_REASON, _ANSWER = "R7e1", "A7e1"  # stand-ins that no template says by itself


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts around reasoning."""

    start: str
    end: str


def marks_of(tokenizer: TokenizerWrapper, template: str) -> Marks | None:
    """The model's marks, None for a model that does not reason apart from its answer."""
    if tokenizer.has_thinking:
        return Marks(tokenizer.think_start, tokenizer.think_end)
    vocabulary = tokenizer.get_vocab()
    for start, end in _MORE_MARKS:
        if start in vocabulary and end in vocabulary:
            return Marks(start, end)
    if "<think>" in template and "</think>" in template:  # written out in ordinary tokens
        return Marks("<think>", "</think>")
    return None


def left_open(prompt: str, marks: Marks) -> bool:
    """Whether the prompt's end asks the model to go on reasoning. A mark inside a message is only text."""
    return prompt.rstrip().endswith(marks.start)


Render = Callable[[list[dict[str, str]], bool], str]


def closing_text(marks: Marks, render: Render) -> str:
    """What the model's template writes between the end of the reasoning and the answer, the mark included.

    `render` renders messages, with thinking on, or off and then with a generation prompt. Looked for where the template
    shows a finished answer with reasoning, then where it shows that none is wanted; else the mark stands alone.
    """
    finished = render(
        [
            {"role": "user", "content": "U"},
            {"role": "assistant", "reasoning_content": _REASON, "content": _ANSWER},
        ],
        True,
    )
    start, stop = finished.find(_REASON), finished.find(_ANSWER)
    if 0 <= start < stop and marks.end in finished[start:stop]:
        return finished[start + len(_REASON) : stop]
    unwanted = render([{"role": "user", "content": "U"}], False)
    at = unwanted.rfind(marks.end)
    return marks.end if at < 0 or unwanted[at + len(marks.end) :].strip() else unwanted[at:]
