"""Prompts: from what a client sends to token ids, by the model's own template and tokenizer.

Runs on a model's tokenizer thread, one prompt at a time: a long template or text delays neither the event loop nor the
engine. Nothing of it is logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from omlxd.engine.api import ChatPrompt, InvalidParams, Json, Prompt, TextPrompt, Thinking, TokenPrompt, Unsupported
from omlxd.engine.messages import conversation, text_of_content
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
    return render(prompt, tokenizer, facts)


def encode(text: str, tokenizer: TokenizerWrapper) -> list[int]:
    """Token ids of raw text with the model's BOS, if it has one."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidParams("prompt", f"character {exc.start} is half of a surrogate pair") from None
    # Quiet: a prompt over the context is refused with numbers by the caller, not warned about here.
    return list(tokenizer.encode(text, verbose=False))


def rendered_ids(text: str, tokenizer: TokenizerWrapper, *, begins: bool = False) -> list[int]:
    """Token ids of what a chat template rendered: it has written every special token itself.

    Unless `begins`, for a template that leaves the first ones to a processor. Raises InvalidParams for a template that
    rendered nothing.
    """
    return _not_empty(list(tokenizer.encode(text, add_special_tokens=begins, verbose=False)), "messages")


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
    """The conversation by the model's template, with or without what begins or continues an answer."""
    return rendered_ids(chat_text(prompt, tokenizer, facts, generation_prompt=generation_prompt), tokenizer)


def chat_text(
    prompt: ChatPrompt, tokenizer: TokenizerWrapper, facts: ModelFacts, *, generation_prompt: bool = True
) -> str:
    """The conversation as the model's template renders it: up to where the answer begins, or goes on if the last
    message is the assistant's. Raises InvalidParams with the template's own words, Unsupported without a template.
    """
    if not facts.has_chat_template:
        reason = f"{facts.name} has no chat template; use generate.complete with a prompt of your own"
        raise Unsupported("chat", reason)
    collisions = RESERVED_KWARGS & prompt.template_kwargs.keys()
    if collisions:
        raise InvalidParams("chat_template_kwargs", f"{', '.join(sorted(collisions))} cannot be set")
    if not prompt.messages:
        raise InvalidParams("messages", "is empty; send one message at least")
    template = template_source(tokenizer)
    messages = conversation(prompt.messages, developer="developer" in template, parts=facts.parts)
    continued = generation_prompt and prefilled(prompt.messages)
    if continued and messages[-1].get("tool_calls"):
        raise InvalidParams("messages", "the last one calls tools; send their results as messages of role tool")
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=generation_prompt and not continued,
            continue_final_message=continued,
            **_offered(prompt),
            **prompt.template_kwargs,
        )
    except TEMPLATE_FAILURES as exc:
        raise InvalidParams("messages", f"the model's chat template refused them: {exc}") from None
    return str(text)


def prefilled(messages: Sequence[Mapping[str, Json]]) -> bool:
    """Whether the last message is the beginning of the answer, to be continued."""
    return bool(continued_text(messages))


def continued_text(messages: Sequence[Mapping[str, Json]]) -> str:
    """What the answer that is to be continued says so far; empty where there is none."""
    last = messages[-1]
    return text_of_content(last.get("content")) if last.get("role") == "assistant" else ""


def template_source(tokenizer: TokenizerWrapper) -> str:
    """The chat template's source, all of them where there are several; empty where it is no Jinja template."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        return "\n".join(str(text) for text in template.values())
    return template if isinstance(template, str) else ""


def _offered(prompt: ChatPrompt) -> dict[str, Json]:
    """The tools, as the template wants them; a client that wants no call is best served by a model that knows none."""
    return {"tools": list(prompt.tools)} if offers_tools(prompt) else {}


def offers_tools(prompt: ChatPrompt) -> bool:
    return bool(prompt.tools) and prompt.tool_choice != "none"


def with_thinking(prompt: ChatPrompt, thinking: Thinking | None, tokenizer: TokenizerWrapper) -> ChatPrompt:
    """The prompt with what the client asked of the reasoning, in the template's words. Raises InvalidParams."""
    if thinking is None:
        return prompt
    twice = {"enable_thinking", "thinking"} & prompt.template_kwargs.keys()
    if twice:
        raise InvalidParams("chat_template_kwargs", f"{', '.join(sorted(twice))} is what `thinking` says already")
    kwargs = {**prompt.template_kwargs, "enable_thinking": thinking.enabled}
    if "thinking" in template_source(tokenizer):  # some templates ask for it under this name
        kwargs["thinking"] = thinking.enabled
    return replace(prompt, template_kwargs=kwargs)
