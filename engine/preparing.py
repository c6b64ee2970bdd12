"""Preparing: everything about a request that is settled before its engine sees it.

A `Preparer` belongs to one model and works on its tokenizer thread, one request at a time: it renders and tokenizes
the prompt and says how the answer is to be read. What cannot be done is refused here, before any generation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from omlxd.engine import prompt as prompts
from omlxd.engine.answer import PLAIN, Form
from omlxd.engine.api import ChatPrompt, GenerateRequest, InvalidParams, Prompt, TextPrompt, Unsupported
from omlxd.engine.channels import Separator, State
from omlxd.engine.conventions import Conventions, conventions_of
from omlxd.engine.courses import Courses
from omlxd.engine.fim import fim_prompt
from omlxd.engine.messages import texts_of
from omlxd.engine.model import ModelFacts
from omlxd.engine.steering import Course
from omlxd.engine.thinking import left_open
from omlxd.engine.tools import function_of

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from omlxd.engine.images import Picture
    from omlxd.engine.vision_inputs import Apart, PictureInput, Sight


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt in token ids and how its answer is read.

    `prompt` is the client's with what else the template is told. `end_ids` end the answer beside the model's own,
    `stop_ids` are those of the stop strings that are tokens of their own and never text.
    """

    prompt: Prompt
    token_ids: Sequence[int]
    form: Form = PLAIN
    end_ids: frozenset[int] = frozenset()
    course: Course | None = None
    stop_ids: frozenset[int] = frozenset()
    pictures: Sequence[PictureInput] = ()


Aparts: TypeAlias = "Mapping[bytes, Apart]"  # pictures by their digests


class Preparer:
    """Prepares one model's requests."""

    def __init__(self, tokenizer: TokenizerWrapper, facts: ModelFacts, sight: Sight | None = None) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._sight = sight

    @cached_property
    def _conventions(self) -> Conventions:
        return conventions_of(self._tokenizer)

    @cached_property
    def _courses(self) -> Courses:
        return Courses(self._tokenizer, self._facts, self._conventions)

    def prepare(
        self, request: GenerateRequest, pictures: Sequence[Picture] = (), apart: Aparts = MappingProxyType({})
    ) -> Prepared:
        """`pictures` are all that the conversation shows, in order, and `apart` what the processor made of each alone.

        Raises InvalidGrammar, InvalidParams and Unsupported for what this model cannot be asked.
        """
        prompt = request.prompt
        if isinstance(prompt, ChatPrompt):
            prepared = self._chat(request, prompt, pictures, apart)
        else:
            prepared = self._completion(request)
        added = self._conventions.added_ids
        stops = frozenset(added[text] for text in request.stopping.stop if text in added)
        return replace(prepared, stop_ids=stops) if stops else prepared

    def _completion(self, request: GenerateRequest) -> Prepared:
        """Raw text: it has no channels, only tokens that are no text."""
        if request.thinking is not None:
            raise Unsupported("thinking", "a text is continued as it stands; use generate.chat")
        conventions = self._conventions
        form = Form(control_ids=conventions.control_ids)
        prompt = request.prompt
        if isinstance(prompt, TextPrompt) and prompt.suffix is not None:
            ids = fim_prompt(prompt.text, prompt.suffix, conventions.fim, self._tokenizer, self._facts.name)
            ends = conventions.fim.end_ids if conventions.fim is not None else frozenset()
            return Prepared(prompt, ids, form, ends, self._courses.of_text(request, form))
        ids = prompts.token_ids(prompt, self._tokenizer, self._facts)
        return Prepared(prompt, ids, form, course=self._courses.of_text(request, form))

    def token_ids(
        self, prompt: Prompt, pictures: Sequence[Picture] = (), apart: Aparts = MappingProxyType({})
    ) -> Sequence[int]:
        """The prompt as the model reads it, without what a request would check. Raises InvalidParams, Unsupported."""
        if not isinstance(prompt, ChatPrompt):
            return prompts.token_ids(prompt, self._tokenizer, self._facts)
        return self._ids(prompt, prompts.chat_text(prompt, self._tokenizer, self._facts), pictures, apart)[0]

    def _ids(
        self, prompt: ChatPrompt, text: str, pictures: Sequence[Picture], apart: Aparts
    ) -> tuple[Sequence[int], Sequence[PictureInput]]:
        """A rendered conversation's token ids, and the pictures with the tokens that stand for them."""
        if self._sight is None:
            return prompts.rendered_ids(text, self._tokenizer), ()
        self._sight.check_text(texts_of(prompt.messages))
        if not pictures:
            return self._encoded(text, self._sight.begins(text)), ()
        return self._sight.prompt(text, pictures, apart, self._encoded)

    def _encoded(self, text: str, begins: bool) -> list[int]:
        return prompts.rendered_ids(text, self._tokenizer, begins=begins)

    def _chat(
        self, request: GenerateRequest, prompt: ChatPrompt, pictures: Sequence[Picture], apart: Aparts
    ) -> Prepared:
        conventions = self._conventions
        self._check(request, prompt)
        prompt = prompts.with_thinking(prompt, request.thinking, self._tokenizer)
        text = prompts.chat_text(prompt, self._tokenizer, self._facts)
        calling = prompts.offers_tools(prompt)
        form = Form(
            dialect=conventions.calling if calling else conventions.plain,
            state=self._state(prompt, text),
            control_ids=conventions.control_ids,
            tool_format=conventions.tool_format if calling else None,
            tools=prompt.tools if calling else (),
            stop_in_reasoning=request.thinking is not None and request.thinking.stop,
            begun=prompts.prefilled(prompt.messages),
        )
        course = self._courses.of_chat(request, prompt, form, text)
        ids, inputs = self._ids(prompt, text, pictures, apart)
        return Prepared(prompt, ids, form, course=course, pictures=inputs)

    def _check(self, request: GenerateRequest, prompt: ChatPrompt) -> None:
        conventions, name = self._conventions, self._facts.name
        thinking = request.thinking
        reasons = conventions.marks is not None or conventions.harmony
        if thinking is not None and not reasons and (thinking.enabled or thinking.budget_tokens is not None):
            raise Unsupported("thinking", f"{name} does not reason apart from its answer; leave thinking out")
        if prompts.offers_tools(prompt) and conventions.tool_format is None:
            raise Unsupported("tools", f"no format of tool calls is known for {name}; leave tools out")
        choice = prompt.tool_choice
        if choice not in (None, "none", "auto") and not prompt.tools:
            raise InvalidParams("tool_choice", "demands a call and there are no tools")
        names = {function_of(tool)["name"] for tool in prompt.tools}
        if isinstance(choice, Mapping) and function_of(choice)["name"] not in names:
            raise InvalidParams("tool_choice", f"no tool is named {function_of(choice)['name']!r}")

    def _state(self, prompt: ChatPrompt, text: str) -> State:
        """Where the answer begins: in the reasoning, if the prompt has opened it."""
        conventions = self._conventions
        if prompts.prefilled(prompt.messages):
            given = Separator(conventions.plain, State.CONTENT)
            given.add(prompts.continued_text(prompt.messages))
            return given.state
        if conventions.marks is not None and left_open(text, conventions.marks):
            return State.REASONING
        return conventions.initial
