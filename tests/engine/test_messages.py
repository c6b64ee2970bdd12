"""A conversation reaches the template in the shape it is written for, and an answer begun is gone on with."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omlxd.cache.hot import HotTier
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from omlxd.engine.api import ChatPrompt, GenerateRequest, InvalidParams, Json, Sampling, Stopping, Thinking, Unsupported
from omlxd.engine.job import make_job
from omlxd.engine.messages import conversation
from omlxd.engine.model import LoadedModel, ModelFacts
from omlxd.engine.prefill import new_caches
from omlxd.engine.preparing import Preparer
from tests.engine.running import Running, engine
from tests.golden.corpus import FOLDER, TOOLS
from tests.golden.script import Script, family_tokenizer
from tests.models import IM_END

CALL = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": '{"t": "x"}'}}


def one(message: Mapping[str, Json], *before: Mapping[str, Json], developer: bool = False) -> dict[str, Any]:
    return conversation([*before, message], developer=developer)[-1]


def test_arguments_are_objects_and_what_is_none_stays_as_it_came() -> None:
    called = one({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert called["tool_calls"][0]["function"]["arguments"] == {"t": "x"}
    broken = {**CALL, "function": {"name": "w", "arguments": "{oops"}}
    assert one({"role": "assistant", "tool_calls": [broken]})["tool_calls"] == [broken]


def test_a_result_names_the_function_whose_call_it_answers() -> None:
    result = {"role": "tool", "content": "9", "tool_call_id": "c1"}
    assert one(result, {"role": "assistant", "tool_calls": [CALL]})["name"] == "w"
    assert one({**result, "name": "mine"}, {"role": "assistant", "tool_calls": [CALL]})["name"] == "mine"
    assert "name" not in one(result)


def test_reasoning_that_came_back_is_where_templates_look_for_it() -> None:
    assert one({"role": "assistant", "content": "a", "reasoning": "r"})["reasoning_content"] == "r"
    assert (
        one({"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "c"})["reasoning_content"]
        == "c"
    )


def test_the_developer_speaks_as_the_system_where_the_template_knows_no_developer() -> None:
    assert one({"role": "developer", "content": "a"})["role"] == "system"
    assert one({"role": "developer", "content": "a"}, developer=True)["role"] == "developer"


def test_names_and_unknown_fields_reach_the_template() -> None:
    assert one({"role": "user", "content": "a", "name": "Ann", "mood": "odd"}) == {
        "role": "user",
        "content": "a",
        "name": "Ann",
        "mood": "odd",
    }


def test_a_picture_is_refused() -> None:
    with pytest.raises(Unsupported):
        one({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})


# -- through the template ---------------------------------------------------------------------------------------------


@pytest.fixture
def qwen(tmp_path: Path) -> LoadedModel:
    file = json.loads((FOLDER / "qwen3.json").read_text())
    own = family_tokenizer(tmp_path, file["tokens"], (), file["template"])
    facts = ModelFacts("q", Path("/nowhere"), 4096, len(own), frozenset({IM_END}), True, 0)
    return LoadedModel(Script([], len(own)), own, facts)


def prepared(model: LoadedModel, *messages: Mapping[str, Json], **changes: Any) -> str:
    prompt = ChatPrompt(messages, changes.pop("tools", ()), changes.pop("choice", None), changes.pop("kwargs", {}))
    made = Preparer(model.tokenizer, model.facts).prepare(GenerateRequest("q", prompt, **changes))
    return str(model.tokenizer.decode(list(made.token_ids)))


USER = {"role": "user", "content": "hi"}


def test_the_last_message_of_the_assistant_is_gone_on_with(qwen: LoadedModel) -> None:
    assert prepared(qwen, USER, {"role": "assistant", "content": "The sky "}).endswith(
        "<|im_start|>assistant\nThe sky "
    )
    assert prepared(qwen, USER, {"role": "assistant", "content": ""}).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_calls_cannot_be_gone_on_with(qwen: LoadedModel) -> None:
    with pytest.raises(InvalidParams) as refused:
        prepared(qwen, USER, {"role": "assistant", "content": "Let me see", "tool_calls": [CALL]})
    assert refused.value.fields["field"] == "messages"


def test_thinking_is_said_in_the_template_s_words_and_once(qwen: LoadedModel) -> None:
    closed = "<think>\n\n</think>\n\n"
    assert prepared(qwen, USER, thinking=Thinking(enabled=False)).endswith(closed)
    assert prepared(qwen, USER, kwargs={"enable_thinking": False}).endswith(closed)
    with pytest.raises(InvalidParams):
        prepared(qwen, USER, thinking=Thinking(), kwargs={"enable_thinking": True})


def test_tools_are_shown_unless_no_call_is_wanted(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools[0].function.name }}{% endif %}!{# <tool_call> tool_call.name #}"
    own = family_tokenizer(tmp_path, {"<tool_call>": False, "</tool_call>": False}, (), template)
    model = LoadedModel(Script([], len(own)), own, ModelFacts("q", Path("/x"), 99, len(own), frozenset(), True, 0))
    assert prepared(model, USER, tools=TOOLS) == "w!"
    assert prepared(model, USER, tools=TOOLS, choice="none") == "!"


def test_tools_are_refused_where_no_format_of_calls_is_known(tmp_path: Path) -> None:
    own = family_tokenizer(tmp_path, {}, (), "{{ messages[0].content }}")
    model = LoadedModel(Script([], len(own)), own, ModelFacts("q", Path("/x"), 99, len(own), frozenset(), True, 0))
    with pytest.raises(Unsupported) as refused:
        prepared(model, USER, tools=TOOLS)
    assert refused.value.fields["what"] == "tools"


def test_an_answer_with_its_reasoning_comes_back_as_the_tokens_it_was(qwen: LoadedModel) -> None:
    """What was trimmed of it is what the template writes itself: the next turn finds all of this one in the cache."""
    own = qwen.tokenizer
    said = own.encode("<think>\nHmm, so.\n</think>\n\nThe sky is blue.", add_special_tokens=False)
    script = Script(said, len(own))
    cache = PrefixCache(root=b"q", layout=ModelLayout(new_caches(script)), tier=HotTier(1 << 30), block_size=16)
    model = replace(qwen, model=script, cache=cache)

    async def main() -> None:
        async with engine(model) as running:

            async def turn(id: str, *messages: Mapping[str, Json]) -> Any:
                asked = GenerateRequest("q", ChatPrompt(messages), Sampling(temperature=0), Stopping(max_tokens=60))
                made = await running.prepare(asked)
                script.prompt_tokens = len(made.token_ids)
                job = make_job(asked, made, running.facts, id=id, arrived=time.monotonic())
                return made, await Running(running, job).result()

            made, first = await turn("one", USER)
            back = {"role": "assistant", "content": first.text, "reasoning": first.reasoning}
            again, second = await turn("two", USER, back, {"role": "user", "content": "why?"})
            before = [*made.token_ids, *first.token_ids]
            assert list(again.token_ids[: len(before)]) == before
            assert second.usage.cached_tokens >= len(before) // 16 * 16

    asyncio.run(main())
