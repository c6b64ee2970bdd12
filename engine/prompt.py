"""Prompts: from what a client sends to token ids, by the model's own template and tokenizer.

Runs on a model's tokenizer thread, one prompt at a time: a long template or text delays neither the event loop nor the
engine. Nothing of it is logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from omlxd.engine.api import ChatPrompt, InvalidParams, Json, Prompt, TextPrompt, TokenPrompt, Unsupported
from omlxd.engine.model import ModelFacts

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

# A template is a program that came with the model; this is what running one over odd messages raises.
TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
# Not variables of a template but parameters of the call that renders it: ours to set. `documents` is a client's.
RESERVED_KWARGS = frozenset(
    {
        "self",
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)


def token_ids(prompt: Prompt, tokenizer: TokenizerWrapper, facts: ModelFacts) -> list[int]:
    """The prompt's token ids.

    Raises InvalidParams for what cannot be a prompt of this model, Unsupported for a chat without a template.
    """
    if isinstance(prompt, TokenPrompt):
        return _not_empty(_checked(prompt.token_ids, facts, "prompt"), "prompt")
    if isinstance(prompt, TextPrompt):
        return _not_empty(encode(prompt.text, tokenizer), "prompt")
    return _not_empty(render(prompt, tokenizer, facts), "messages")


def encode(text: str, tokenizer: TokenizerWrapper) -> list[int]:
    """Token ids of raw text with the model's BOS, if it has one."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidParams("prompt", f"character {exc.start} is half of a surrogate pair") from None
    # Quiet: a prompt over the context is refused with numbers by the caller, not warned about here.
    return list(tokenizer.encode(text, verbose=False))


def text_of(ids: Sequence[int], tokenizer: TokenizerWrapper, facts: ModelFacts) -> str:
    """What the ids stand for, special tokens included. Raises InvalidParams for an id outside the vocabulary."""
    return str(tokenizer.decode(_checked(ids, facts, "tokens"), skip_special_tokens=False))


def _checked(ids: Sequence[int], facts: ModelFacts, field: str) -> list[int]:
    for position, id in enumerate(ids):
        if not 0 <= id < facts.vocab_size:
            reason = (
                f"token {id} at position {position} is outside this model's vocabulary, 0 to {facts.vocab_size - 1}"
            )
            raise InvalidParams(field, reason)
    return list(ids)


def _not_empty(ids: list[int], field: str) -> list[int]:
    if not ids:
        raise InvalidParams(field, "comes to no tokens; a prompt needs one at least")
    return ids


def render(
    prompt: ChatPrompt, tokenizer: TokenizerWrapper, facts: ModelFacts, *, generation_prompt: bool = True
) -> list[int]:
    """The conversation by the model's template, with or without the words that begin an answer."""
    if not facts.has_chat_template:
        reason = f"{facts.name} has no chat template; use generate.complete with a prompt of your own"
        raise Unsupported("chat", reason)
    collisions = RESERVED_KWARGS & prompt.template_kwargs.keys()
    if collisions:
        raise InvalidParams("chat_template_kwargs", f"{', '.join(sorted(collisions))} cannot be set")
    if not prompt.messages:
        raise InvalidParams("messages", "is empty; send one message at least")
    messages = [_plain(message) for message in prompt.messages]
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **prompt.template_kwargs
        )
    except TEMPLATE_FAILURES as exc:
        raise InvalidParams("messages", f"the model's chat template refused them: {exc}") from None
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _plain(message: Mapping[str, Json]) -> dict[str, Json]:
    """A message as text templates expect it: content is a string, text parts joined."""
    content = message.get("content")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, Sequence) and not isinstance(content, str):
        return {**message, "content": "".join(_part_text(part) for part in content)}
    return dict(message)


def _part_text(part: Json) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise Unsupported("image input", "this model takes text; send parts of type text")
