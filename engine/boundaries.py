"""Where the messages of a rendered conversation end, in tokens: the places at which checkpoints are worth taking.

For models whose state cannot be cut, a prefix is reusable only at a checkpoint. The next request of a conversation, or
another one with the same system message, shares whole messages, so these are where it will part from this one. Found
by rendering the leading messages alone and comparing ids: templates are free to render as they like, and one that
renders a shorter conversation otherwise simply agrees up to a shorter place. Runs on a model's tokenizer thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omlxd.engine.api import ChatPrompt, InvalidParams, Prompt
from omlxd.engine.prompt import render

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from omlxd.engine.model import ModelFacts

# Of a long conversation only the first message, which others share, and the last ones: each costs a rendering.
LAST_MESSAGES = 8


def boundaries(prompt: Prompt, ids: Sequence[int], tokenizer: TokenizerWrapper, facts: ModelFacts) -> list[int]:
    """Positions inside `ids`, ascending, up to which the prompt's leading messages alone render the same."""
    if not isinstance(prompt, ChatPrompt):
        return []
    count = len(prompt.messages)
    leading = {1, *range(max(1, count - LAST_MESSAGES), count)} if count > 1 else set()
    found = {_agreement(_leading(prompt, messages, tokenizer, facts), ids) for messages in sorted(leading)}
    return sorted(position for position in found if 0 < position < len(ids))


def _leading(prompt: ChatPrompt, messages: int, tokenizer: TokenizerWrapper, facts: ModelFacts) -> list[int]:
    shorter = ChatPrompt(prompt.messages[:messages], prompt.tools, prompt.tool_choice, prompt.template_kwargs)
    try:
        return render(shorter, tokenizer, facts, generation_prompt=False)
    except InvalidParams:
        return []  # the template wants more than these, a user's message for instance


def _agreement(shorter: Sequence[int], ids: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    pairs = zip(shorter, ids, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(shorter), len(ids)))
