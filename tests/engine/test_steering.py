"""What a client demands of an answer holds for every token of it, and for no other row."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlxd.engine.api import (
    ChatPrompt,
    GenerateRequest,
    GenerationResult,
    InvalidGrammar,
    InvalidParams,
    Sampling,
    Stopping,
    TextPrompt,
    Thinking,
    Unsupported,
)
from omlxd.engine.conventions import conventions_of
from omlxd.engine.grammar import MAX_BLANK_RUN, MAX_BLANKS
from omlxd.engine.job import Job, make_job
from omlxd.engine.model import LoadedModel, ModelFacts
from omlxd.engine.preparing import Preparer
from omlxd.engine.steering import Steering
from tests.engine.running import Running, engine, loaded
from tests.golden.corpus import FOLDER, TOOLS
from tests.golden.script import Script, family_tokenizer
from tests.models import IM_END

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
AS_JSON = {"type": "json_schema", "schema": SCHEMA}


@cache
def tokenizer(family: str) -> Any:
    file = json.loads((FOLDER / f"{family}.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        return family_tokenizer(Path(folder), file["tokens"], (), file["template"])


def speaker(family: str, pieces: Sequence[str] = (), favour: Mapping[str, float] | None = None) -> LoadedModel:
    """A model of the family that wants to say these pieces, and otherwise what it favours."""
    own = tokenizer(family)
    ids = [id for piece in pieces for id in own.encode(piece, add_special_tokens=False)]
    size = len(own)
    ends = frozenset({IM_END} | {id for text, id in own.get_vocab().items() if text in ("<|return|>", "<|call|>")})
    facts = ModelFacts(family, Path("/nowhere"), 2048, size, ends, True, 0)
    liked = {ord(char): logit for char, logit in (favour or {}).items()}
    return LoadedModel(Script(ids, size, liked), own, facts)


def chat(**changes: Any) -> GenerateRequest:
    tools, choice = changes.pop("tools", ()), changes.pop("tool_choice", None)
    stopping = Stopping(max_tokens=changes.pop("max_tokens", 300), stop=changes.pop("stop", ()))
    prompt = ChatPrompt(changes.pop("messages", ({"role": "user", "content": "hi"},)), tools, choice)
    return GenerateRequest("m", prompt, Sampling(temperature=0), stopping, **changes)


async def start(running: Any, model: LoadedModel, request: GenerateRequest, **changes: Any) -> Running:
    prepared = await running.prepare(request)
    model.model.prompt_tokens = len(prepared.token_ids)
    job = make_job(request, prepared, running.facts, id=f"s{id(request)}", arrived=time.monotonic())
    return Running(running, job)


def answer(model: LoadedModel, request: GenerateRequest) -> GenerationResult:
    async def main() -> GenerationResult:
        async with engine(model) as running:
            return await (await start(running, model, request)).result()

    return asyncio.run(main())


def says(result: GenerationResult) -> str:
    return tokenizer("qwen3").decode(list(result.token_ids))


# -- reasoning --------------------------------------------------------------------------------------------------------


def test_at_its_budget_the_reasoning_is_closed_as_the_template_closes_it() -> None:
    model = speaker("qwen3", ["<think>", "\n", "one two three four five six"])
    result = answer(model, chat(thinking=Thinking(budget_tokens=7), max_tokens=30))
    assert result.reasoning == "one t"
    closing = "\n</think>\n\n"
    assert closing in says(result)
    assert result.usage.reasoning_tokens == 7 + 2  # the line break and the mark; what follows it is no reasoning


def test_no_budget_at_all_closes_a_reasoning_that_the_prompt_opened() -> None:
    result = answer(speaker("deepseek_r1", ["abc"]), chat(thinking=Thinking(enabled=False), max_tokens=6))
    assert result.reasoning is None
    assert result.usage.reasoning_tokens == 1  # the closing mark


def test_a_reasoning_within_its_budget_is_left_alone() -> None:
    model = speaker("qwen3", ["<think>", "ab", "</think>", "cd"])
    result = answer(model, chat(thinking=Thinking(budget_tokens=50)))
    assert (result.reasoning, result.text, result.finish_reason) == ("ab", "cd", "stop")


def test_gpt_oss_goes_on_to_its_final_channel() -> None:
    model = speaker("gpt_oss", ["<|channel|>", "analysis", "<|message|>", "long thoughts without an end"])
    result = answer(model, chat(thinking=Thinking(budget_tokens=6), max_tokens=40))
    ids = list(result.token_ids)
    assert "<|end|><|start|>assistant<|channel|>final<|message|>" in tokenizer("gpt_oss").decode(ids)
    assert result.reasoning is not None
    assert result.text


def test_a_model_that_does_not_reason_cannot_be_told_to() -> None:
    model = speaker("lfm2")
    with pytest.raises(Unsupported):
        answer(model, chat(thinking=Thinking()))
    assert answer(speaker("lfm2", ["ok"]), chat(thinking=Thinking(enabled=False))).text == "ok"


# -- grammars ---------------------------------------------------------------------------------------------------------


def test_an_answer_follows_its_schema_whatever_the_model_would_say() -> None:
    result = answer(speaker("lfm2", ["Sure! Here it is"], {'"': 1.0}), chat(response_format=AS_JSON))
    assert set(json.loads(result.text)) == {"a"}
    assert result.finish_reason == "stop"
    assert result.timings.mask_ms > 0


@pytest.mark.parametrize(
    ("format", "right"),
    [
        ({"type": "json_object"}, lambda text: isinstance(json.loads(text), dict)),
        ({"type": "regex", "pattern": "[a-c]{2,4}-[0-9]+x"}, lambda text: re.fullmatch("[a-c]{2,4}-[0-9]+x", text)),
        ({"type": "grammar", "lark": 'start: ("ab" | "cd")+ "."'}, lambda text: re.fullmatch(r"(ab|cd)+\.", text)),
    ],
)
def test_every_kind_of_format_holds(format: dict[str, str], right: Any) -> None:
    result = answer(
        speaker("lfm2", ["nonsense"], {"}": 3.0, "x": 3.0, ".": 3.0, '"': 2.0}), chat(response_format=format)
    )
    assert right(result.text)
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("others", [{}, {'"': 1.0}], ids=["all others alike", "then the closing quote"])
def test_a_model_that_prefers_blanks_comes_to_an_end(others: dict[str, float]) -> None:
    """ST-17: at most MAX_BLANKS between the parts, at most MAX_BLANK_RUN in a string, which then ends."""
    result = answer(speaker("lfm2", [" " * 250], others), chat(response_format=AS_JSON, max_tokens=200))
    assert json.loads(result.text)["a"].isspace()
    assert result.finish_reason == "stop"
    assert max(len(run) for run in re.findall(r"\s+", result.text)) <= max(MAX_BLANKS, MAX_BLANK_RUN)


def test_an_end_token_that_is_text_too_is_not_said_where_the_answer_may_not_end() -> None:
    model = speaker("qwen3", ["{\n"])
    (line_break,) = tokenizer("qwen3").encode("\n", add_special_tokens=False)
    ends = model.facts.eos_token_ids | {line_break}
    result = answer(replace(model, facts=replace(model.facts, eos_token_ids=ends)), chat(response_format=AS_JSON))
    assert result.finish_reason == "stop"
    assert set(json.loads(result.text)) == {"a"}


def test_a_truncated_answer_says_length() -> None:
    result = answer(speaker("lfm2", ["x"]), chat(response_format=AS_JSON, max_tokens=4))
    assert result.finish_reason == "length"


def test_a_stop_string_ends_a_constrained_answer() -> None:
    result = answer(speaker("lfm2", ['{"a"']), chat(response_format=AS_JSON, stop=['"a']))
    assert (result.text, result.finish_reason) == ("{", "stop")


def test_the_grammar_begins_after_the_reasoning() -> None:
    model = speaker("qwen3", ["<think>", "\n", "free", "\n", "</think>"], {'"': 1.0})
    result = answer(model, chat(response_format=AS_JSON))
    assert result.reasoning == "free"
    assert set(json.loads(result.text)) == {"a"}
    assert "</think>\n\n{" in says(result)  # as the template has it


def test_after_a_reasoning_cut_by_its_budget_too() -> None:
    model = speaker("deepseek_r1", ["and so on without an end"], {'"': 1.0})
    result = answer(model, chat(response_format=AS_JSON, thinking=Thinking(budget_tokens=5)))
    assert result.reasoning == "and s"
    assert set(json.loads(result.text)) == {"a"}


def test_without_thinking_the_grammar_holds_at_once() -> None:
    result = answer(
        speaker("qwen3", ["<think>"], {'"': 1.0}), chat(response_format=AS_JSON, thinking=Thinking(enabled=False))
    )
    assert result.reasoning is None
    assert set(json.loads(result.text)) == {"a"}


def test_gpt_oss_is_held_to_it_in_its_final_channel() -> None:
    said = ["<|channel|>", "analysis", "<|message|>", "Hm", "<|end|>"]
    result = answer(speaker("gpt_oss", said, {'"': 1.0}), chat(response_format=AS_JSON))
    assert result.reasoning == "Hm"
    assert set(json.loads(result.text)) == {"a"}


def test_a_raw_text_can_be_held_to_a_grammar() -> None:
    request = GenerateRequest(
        "m", TextPrompt("n = "), Sampling(temperature=0), response_format={"type": "regex", "pattern": "[0-9]{3}"}
    )
    assert re.fullmatch("[0-9]{3}", answer(speaker("lfm2"), request).text)


@pytest.mark.parametrize(
    "format",
    [
        {"type": "regex", "pattern": "(a"},
        {"type": "regex", "pattern": "a" * 200_000},
        {"type": "regex", "pattern": "(" * 50_000},
        {"type": "grammar", "lark": "start: nobody"},
        {"type": "grammar", "lark": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
        {"type": "json_schema", "schema": {"type": "strin"}},
        {"type": "json_schema", "schema": {"$ref": "http://example.org/schema"}},
        {"type": "json_schema", "schema": False},
        {"type": "json_schema", "schema": {"type": "string", "pattern": "["}},
    ],
    ids=lambda format: str(format)[:50],
)
def test_what_is_no_grammar_or_too_large_is_refused_before_any_generation(format: dict[str, Any]) -> None:
    model = speaker("lfm2")
    with pytest.raises(InvalidGrammar) as refused:
        Preparer(model.tokenizer, model.facts).prepare(chat(response_format=format))
    assert len(refused.value.message) < 600


def test_ignoring_the_end_cannot_go_with_a_grammar() -> None:
    model = speaker("lfm2")
    request = GenerateRequest(
        "m", TextPrompt("x"), stopping=Stopping(ignore_eos=True), response_format={"type": "json_object"}
    )
    with pytest.raises(InvalidParams):
        Preparer(model.tokenizer, model.facts).prepare(request)


# -- calls ------------------------------------------------------------------------------------------------------------

CALLING = ["qwen3", "mistral", "kimi_k2", "qwen3_coder", "minimax_m2", "glm", "lfm2", "gemma4", "gpt_oss", "longcat"]


@pytest.mark.parametrize("family", CALLING)
def test_a_demanded_call_begins_as_the_family_begins_it(family: str) -> None:
    by_name = {"type": "function", "function": {"name": "rm"}}
    model = speaker(family, ["I would rather not"])
    opening = model_opening(model, "rm")
    result = answer(model, chat(tools=TOOLS, tool_choice=by_name, max_tokens=120, thinking=off(family)))
    said = tokenizer(family).decode(list(result.token_ids))
    assert opening in said


@pytest.mark.parametrize("family", ["qwen3", "mistral", "kimi_k2", "gpt_oss"])
def test_a_demanded_call_with_json_arguments_is_whole_and_fits_its_tool(family: str) -> None:
    model = speaker(family, ["I would rather not"], {"}": 1.0, '"': 0.5})
    result = answer(model, chat(tools=TOOLS, tool_choice="required", thinking=off(family)))
    assert result.tool_calls
    function = result.tool_calls[0]["function"]
    assert function["name"] in ("w", "rm")
    assert set(json.loads(function["arguments"])) <= {"t", "n"}
    assert result.finish_reason == "tool_calls"


def off(family: str) -> Thinking | None:
    return Thinking(enabled=False) if family not in ("mistral", "kimi_k2") else None


def model_opening(model: LoadedModel, name: str) -> str:
    format = conventions_of(model.tokenizer).tool_format
    assert format is not None
    return format.opening(name)


def test_a_demanded_call_comes_after_the_reasoning() -> None:
    model = speaker("qwen3", ["<think>", "Hm", "</think>", "never mind"], {"}": 1.0})
    result = answer(model, chat(tools=TOOLS, tool_choice="required"))
    assert result.reasoning == "Hm"
    assert result.tool_calls
    assert result.text == ""


def test_a_demanded_answer_cannot_end_inside_the_reasoning() -> None:
    model = speaker("qwen3", ["<think>", "Hm"], {"}": 1.0})
    result = answer(model, chat(tools=TOOLS, tool_choice="required", max_tokens=40))
    assert result.finish_reason == "length"


def test_a_schema_for_the_answer_leaves_calls_possible() -> None:
    call = '{"name": "w", "arguments": {"t": "x"}}'
    model = speaker("qwen3", ["<tool_call>", call, "</tool_call>"])
    result = answer(model, chat(tools=TOOLS, response_format=AS_JSON))
    assert [called["function"]["name"] for called in result.tool_calls or ()] == ["w"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": AS_JSON}, "response_format"),
    ],
)
def test_demands_that_contradict_each_other_are_refused(changes: dict[str, Any], field: str) -> None:
    model = speaker("qwen3")
    with pytest.raises(InvalidParams) as refused:
        Preparer(model.tokenizer, model.facts).prepare(chat(**changes))
    assert refused.value.fields["field"] == field


# -- rows -------------------------------------------------------------------------------------------------------------


def test_a_grammar_holds_for_its_own_row_only_and_for_several_at_once() -> None:
    model = speaker("lfm2", ["Hello there"], {'"': 1.0})

    async def main() -> list[GenerationResult]:
        async with engine(model) as running:
            plain, held = chat(), chat(response_format=AS_JSON)
            numbers = chat(response_format={"type": "regex", "pattern": "[0-9]{5}"})
            rows = [
                await start(running, model, request)
                for request in (plain, held, numbers, chat(), chat(response_format=AS_JSON))
            ]
            return [await row.result() for row in rows]

    plain, held, numbers, again, also = asyncio.run(main())
    assert plain.text == again.text == "Hello there"
    assert json.loads(held.text) == json.loads(also.text)
    assert re.fullmatch("[0-9]{5}", numbers.text)


def test_rows_that_cannot_be_merged_are_held_as_well() -> None:
    plain = loaded("llama4", eos=frozenset({IM_END}))

    async def main() -> list[GenerationResult]:
        async with engine(plain) as running:
            assert not running.merges_rows
            requests = [
                chat(response_format={"type": "regex", "pattern": pattern}) for pattern in ("[ab]{6}", "[0-9]{4}")
            ]
            jobs = []
            for request in requests:
                prepared = await running.prepare(request)
                jobs.append(make_job(request, prepared, running.facts, id=f"i{len(jobs)}", arrived=time.monotonic()))
            return await asyncio.gather(*(Running(running, job).result() for job in jobs))

    letters, digits = asyncio.run(main())
    assert re.fullmatch("[ab]{6}", letters.text)
    assert re.fullmatch("[0-9]{4}", digits.text)


def test_a_preempted_answer_still_follows_its_grammar() -> None:
    """With one row, an interactive request takes the place of the batch one, which then comes back."""
    plain = loaded("llama", eos=frozenset({IM_END}))
    form = {"type": "regex", "pattern": "[a-z]{40}"}

    async def main() -> tuple[GenerationResult, GenerationResult, list[str]]:
        async with engine(plain, max_batch=1) as running:
            request = chat(response_format=form, max_tokens=60, priority="batch", stream=True)
            prepared = await running.prepare(request)

            def job(id: str) -> Job:
                return make_job(request, prepared, running.facts, id=id, arrived=time.monotonic())

            alone = await Running(running, job("alone")).result()
            held = Running(running, job("held"))
            await held.first_token()
            quick = await running.prepare(chat(max_tokens=2))
            urgent = make_job(chat(max_tokens=2), quick, running.facts, id="urgent", arrived=time.monotonic())
            ends: list[str] = []

            async def ended(each: Running) -> GenerationResult:
                result = await each.result()
                ends.append(each.job.id)
                return result

            preempted, _ = await asyncio.gather(ended(held), ended(Running(running, urgent)))
            return alone, preempted, ends

    alone, preempted, ends = asyncio.run(main())
    assert ends == ["urgent", "held"]
    assert re.fullmatch("[a-z]{40}", preempted.text)
    assert preempted.token_ids == alone.token_ids


def test_a_grammar_that_begins_like_a_call_stays_a_grammar() -> None:
    model = speaker("minicpm5", ["<b>hi</b>"])
    request = chat(tools=TOOLS, response_format={"type": "regex", "pattern": "<b>[a-z]+</b>"})
    assert answer(model, request).text == "<b>hi</b>"


@pytest.mark.parametrize(
    "demand",
    [
        chat(response_format=AS_JSON),
        chat(tools=TOOLS, tool_choice="required"),
        chat(thinking=Thinking(budget_tokens=4), response_format=AS_JSON),
    ],
    ids=["grammar", "call", "budget"],
)
def test_a_row_that_comes_back_goes_on_where_it_was(demand: GenerateRequest) -> None:
    """The steering made from any part of an answer allows what the one that saw all of it allows."""
    model = speaker("qwen3", ["<think>", "thinking", "</think>"], {'"': 2.0, "}": 1.0})
    ids = list(answer(model, demand).token_ids)
    prepared = Preparer(model.tokenizer, model.facts).prepare(demand)
    assert prepared.course is not None
    logits = mx.zeros((1, model.facts.vocab_size))
    whole = Steering(prepared.course, model.tokenizer)
    for position, newest in enumerate([0, *ids[:-1]]):
        allowed = whole(mx.array([newest]), logits)
        resumed = Steering(prepared.course, model.tokenizer, ids[:position])
        assert mx.array_equal(allowed, resumed(mx.array([newest]), logits)), position
