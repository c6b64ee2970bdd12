"""Courses: from what a client demands of an answer to the tokens and grammars that its steering needs.

Belongs to one model, works on its tokenizer thread: templates are rendered, texts tokenized and grammars compiled here,
and what cannot be demanded is refused before any generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from omlxd.engine.answer import Form
from omlxd.engine.api import ChatPrompt, GenerateRequest, InvalidParams, Json, Unsupported
from omlxd.engine.channels import State
from omlxd.engine.conventions import Conventions
from omlxd.engine.grammar import Grammar, Grammars
from omlxd.engine.model import ModelFacts
from omlxd.engine.prompt import TEMPLATE_FAILURES
from omlxd.engine.steering import Course, Opening
from omlxd.engine.thinking import closing_text
from omlxd.engine.tools import ToolFormat, function_of

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

_HARMONY_END, _HARMONY_NEXT = "<|end|>", "<|start|>assistant"
_HARMONY_ANALYSIS, _HARMONY_FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True)
class Texts:
    """What this model writes around its reasoning: what opens it, what closes it, what follows the closing mark."""

    opening: str
    closing: str
    after: str


class Courses:
    """Makes one model's courses."""

    def __init__(self, tokenizer: TokenizerWrapper, facts: ModelFacts, conventions: Conventions) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._conventions = conventions
        self._grammars = Grammars(tokenizer, facts)

    def of_text(self, request: GenerateRequest, form: Form) -> Course | None:
        """A raw text's: it can be held to a grammar. Raises InvalidGrammar, InvalidParams, Unsupported."""
        grammar = self._grammar(request)
        return None if grammar is None else Course(form, self._facts.vocab_size, grammar=grammar)

    def of_chat(self, request: GenerateRequest, prompt: ChatPrompt, form: Form, text: str) -> Course | None:
        """A chat's, rendered as `text`; None where nothing is demanded. Raises as `of_text`."""
        grammar = self._grammar(request)
        openings = self._openings(prompt)
        if grammar is not None and openings:
            raise InvalidParams("response_format", "cannot go with a tool_choice that demands a call; leave one out")
        budget = self._budget(request, form)
        if grammar is None and not openings and budget is None:
            return None
        texts = self._texts(calling=bool(openings))
        format = form.tool_format
        return Course(
            form,
            self._facts.vocab_size,
            budget=budget,
            closing=self._ids(texts.closing),
            begins=self._conventions.initial if openings and not form.begun else State.CONTENT,
            openings=openings,
            grammar=grammar,
            reasoning=self._ids(texts.opening) if self._may_reason(request, form, text) else (),
            after_reasoning=self._ids(texts.after),
            call=self._ids(format.start) if format is not None and not self._conventions.harmony else (),
            ends=self._facts.eos_token_ids,
        )

    def _grammar(self, request: GenerateRequest) -> Grammar | None:
        if request.response_format is None:
            return None
        if request.stopping.ignore_eos:
            raise InvalidParams("ignore_eos", "cannot go with response_format, whose text ends where it is complete")
        return self._grammars.of_format(request.response_format)

    def _budget(self, request: GenerateRequest, form: Form) -> int | None:
        """Tokens of reasoning; none at all where it is not wanted and the template starts it all the same."""
        if request.thinking is None:
            return None
        if not request.thinking.enabled and (form.state is State.REASONING or self._conventions.harmony):
            return 0
        return request.thinking.budget_tokens

    def _may_reason(self, request: GenerateRequest, form: Form, text: str) -> bool:
        """Whether the model may still begin to reason: not if it was told not to, or is past that."""
        if (
            form.begun
            or form.state is State.REASONING
            or (request.thinking is not None and not request.thinking.enabled)
        ):
            return False
        marks = self._conventions.marks
        return self._conventions.harmony or (marks is not None and not text.rstrip().endswith(marks.end))

    def _texts(self, *, calling: bool) -> Texts:
        if self._conventions.harmony:
            after = _HARMONY_NEXT if calling else _HARMONY_NEXT + _HARMONY_FINAL
            return Texts(_HARMONY_ANALYSIS, _HARMONY_END + after, after)
        marks = self._conventions.marks
        if marks is None:
            return Texts("", "", "")
        closing = self._closing
        return Texts(marks.start, closing, closing[closing.index(marks.end) + len(marks.end) :])

    @cached_property
    def _closing(self) -> str:
        marks = self._conventions.marks
        return "" if marks is None else closing_text(marks, self._rendered)

    def _rendered(self, messages: list[dict[str, str]], thinking: bool) -> str:
        """What the template makes of these messages; nothing, if it does not take them."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=not thinking, enable_thinking=thinking
                )
            )
        except TEMPLATE_FAILURES:
            return ""

    def _openings(self, prompt: ChatPrompt) -> Sequence[Opening]:
        """How the answer may begin where it must be a call."""
        choice, format = prompt.tool_choice, self._conventions.tool_format
        if choice in (None, "none", "auto") or format is None:
            return ()
        functions = [function_of(tool) for tool in prompt.tools]
        if isinstance(choice, Mapping):
            chosen = function_of(choice)["name"]
            functions = [function for function in functions if function["name"] == chosen]
        return [self._opening(format, function) for function in functions]

    def _opening(self, format: ToolFormat, function: Mapping[str, Json]) -> Opening:
        ids = self._ids(format.opening(str(function["name"])))
        if format.tail is None:
            return Opening(ids)
        try:
            arguments = self._grammars.of_schema(function.get("parameters") or {"type": "object"}, lenient=True)
        except Unsupported:  # the call is demanded all the same, its arguments are the model's own
            return Opening(ids)
        return Opening(ids, arguments, self._ids(format.tail))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False)) if text else []
