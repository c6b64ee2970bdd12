"""Parameters: what each takes, what it becomes, and how a wrong one is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from omlxd.engine.api import (
    ChatPrompt,
    GenerateRequest,
    InvalidParams,
    Sampling,
    Stopping,
    TextPrompt,
    Thinking,
    TokenPrompt,
)
from omlxd.rpc.decoding import decode_params
from omlxd.rpc.methods import METHODS
from omlxd.rpc.params import ChatParams, CompleteParams, LoadParams, NoParams, TokenizeParams

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def complete(**params: Any) -> GenerateRequest:
    given = {"model": "tiny", "prompt": "hi", **params}
    decoded = decode_params(CompleteParams, Raw(json.dumps(given).encode()))
    return decoded.request(decoded.as_prompt())


def chat(**params: Any) -> GenerateRequest:
    given = {"model": "tiny", "messages": [USER], **params}
    decoded = decode_params(ChatParams, Raw(json.dumps(given).encode()))
    return decoded.request(decoded.prompt())


def test_nothing_given_is_the_default_of_everything() -> None:
    assert complete() == GenerateRequest("tiny", TextPrompt("hi"))
    assert chat() == GenerateRequest("tiny", ChatPrompt([USER]))


def test_null_is_the_default_too() -> None:
    optional = [f.encode_name for f in msgspec.structs.fields(CompleteParams) if not f.required]
    assert complete(**dict.fromkeys(optional)) == complete()


def test_every_parameter_arrives() -> None:
    request = complete(
        max_tokens=10**12,
        temperature=0,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        xtc_probability=0.2,
        xtc_threshold=0.3,
        repetition_penalty=1.1,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"5": -100, "7": 1.5},
        seed=0,
        stop=["a", "b"],
        stop_token_ids=[0, 9],
        ignore_eos=True,
        logprobs=20,
        response_format={"type": "json_schema", "schema": {"type": "object"}},
        thinking={"enabled": False, "budget_tokens": 5},
        priority="batch",
        session="s",
        cache=False,
        autoload=False,
    )
    assert request.sampling == Sampling(0, 0.9, 40, 0.1, 0.2, 0.3, 1.1, -2, 2, {5: -100, 7: 1.5}, 0)
    assert request.stopping == Stopping(10**12, ["a", "b"], [0, 9], True)
    assert request.thinking == Thinking(enabled=False, budget_tokens=5)
    assert request.response_format == {"type": "json_schema", "schema": {"type": "object"}}
    assert (request.logprobs, request.priority, request.session) == (20, "batch", "s")
    assert (request.cache, request.autoload) == (False, False)


REFUSED = [
    ("max_tokens", [0, -1, 1.5, 1.0, "5", True, []]),
    ("temperature", [-1, -0.001, "0", True]),
    ("top_p", [0, 1.01, -1, True]),
    ("top_k", [-1, 1.5, True]),
    ("min_p", [-0.1, 1.1]),
    ("xtc_probability", [-0.1, 1.1]),
    ("xtc_threshold", [-0.1, 0.51]),
    ("repetition_penalty", [0, -1]),
    ("presence_penalty", [-2.1, 2.1]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("logit_bias", [{"a": 1}, {"-1": 1}, {"1": "x"}, {"1": True}, [1]]),
    ("seed", [2**63, -1, "5", 1.5, False]),
    ("stop", ["a", [""], [1], ["a"] * 17, {}]),
    ("stop_token_ids", [[-1], ["1"], [True], 1]),
    ("ignore_eos", [1, "true"]),
    ("logprobs", [-1, 21, True, 1.5]),
    ("response_format", [{}, {"type": "xml"}, {"type": "regex"}, {"type": "json_object", "schema": {}}, "json_object"]),
    ("thinking", [True, {"enabled": 1}, {"budget_tokens": -1}, {"budget": 1}]),
    ("stream", [1, "yes"]),
    ("return_token_ids", [0]),
    ("priority", ["high", 1]),
    ("session", ["", 1]),
    ("cache", [0]),
    ("autoload", ["no"]),
    ("model", ["", 5, None]),
    ("prompt", [[], [-1], [1.5], ["a"], 5, None, {}]),
    ("suffix", [5]),
    ("workDoneToken", [1.5, True, []]),
    ("partialResultToken", [1.5, True, {}]),
    ("best_of", [2]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REFUSED for value in values])
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidParams) as refused:
        complete(**{field: value})
    assert refused.value.fields["field"] == field
    assert refused.value.fields["reason"]


def test_a_refusal_gives_the_range() -> None:
    with pytest.raises(InvalidParams, match=r"logprobs: .*an integer from 0 \(off\) to 20"):
        complete(logprobs=21)
    with pytest.raises(InvalidParams, match=r"seed: .*0 to 9223372036854775807"):
        complete(seed=-1)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400])
def test_a_number_beyond_what_there_is_is_refused(number: str) -> None:
    with pytest.raises(InvalidParams, match="temperature"):
        decode_params(CompleteParams, Raw(b'{"model":"a","prompt":"b","temperature":%b}' % number.encode()))


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(InvalidParams, match="prompt: is missing"):
        decode_params(CompleteParams, Raw(b'{"model":"a"}'))


def test_what_is_unknown_is_refused_also_where_nothing_is_taken() -> None:
    with pytest.raises(InvalidParams, match="verbose: is not a parameter"):
        decode_params(NoParams, Raw(b'{"verbose":true}'))


@pytest.mark.parametrize("depth", [500, 900, 5000])
@pytest.mark.parametrize("params", [b'{"x":%b}', b"%b", b'{"model":"a","prompt":"b","response_format":%b}'])
def test_deep_nesting_is_refused_whatever_gives_way_first(depth: int, params: bytes) -> None:
    with pytest.raises(InvalidParams):
        decode_params(CompleteParams, Raw(params % (b"[" * depth + b"]" * depth)))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "be"}, {"role": "developer", "content": "brief"}, USER],
        [{"role": "system", "content": "alone"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "   "}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}],
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
        ],
        [USER, {"role": "assistant", "tool_calls": [CALL]}],
        [USER, {"role": "assistant", "content": "a", "reasoning_content": "because", "refusal": None}, USER],
    ],
)
def test_openai_messages_pass_as_they_came(messages: list[dict[str, Any]]) -> None:
    prompt = chat(messages=messages).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == messages


@pytest.mark.parametrize(
    "message",
    [
        {"role": "bot", "content": "x"},
        {"role": 1, "content": "x"},
        {"content": "x"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": 5},
        {"role": "user", "content": []},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"text": "no type"}]},
        {"role": "user", "content": [{"type": "audio", "text": "x"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]},
        {"role": "tool", "content": "no id"},
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]},
    ],
)
def test_another_message_is_refused_by_its_place(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams) as refused:
        chat(messages=[USER, message])
    assert refused.value.fields["field"] == "messages[1]"


@pytest.mark.parametrize("messages", [[], {}, "hi", [5], None])
def test_messages_are_a_list_of_at_least_one(messages: Any) -> None:
    with pytest.raises(InvalidParams) as refused:
        chat(messages=messages)
    assert refused.value.fields["field"] == "messages"


@pytest.mark.parametrize("choice", [None, "none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_tools_and_their_choice_pass_as_they_came(choice: Any) -> None:
    prompt = chat(tools=[TOOL], tool_choice=choice, chat_template_kwargs={"enable_thinking": False}).prompt
    assert prompt == ChatPrompt([USER], [TOOL], choice, {"enable_thinking": False})


@pytest.mark.parametrize("choice", ["any", 5, {"type": "function"}, {"function": {"name": "f"}}])
def test_another_tool_choice_is_refused(choice: Any) -> None:
    with pytest.raises(InvalidParams, match="tool_choice"):
        chat(tools=[TOOL], tool_choice=choice)


@pytest.mark.parametrize(
    "tool", [{}, {"type": "function"}, {"type": "web", "function": {"name": "f"}}, {"type": "function", "function": {}}]
)
def test_another_tool_is_refused_by_its_place(tool: Any) -> None:
    with pytest.raises(InvalidParams, match=r"tools\[1\]"):
        chat(tools=[TOOL, tool])


def test_a_prompt_is_text_or_token_ids_and_only_text_has_a_suffix() -> None:
    assert complete(prompt="").prompt == TextPrompt("")
    assert complete(prompt="a", suffix="b").prompt == TextPrompt("a", "b")
    assert complete(prompt=[1, 2]).prompt == TokenPrompt([1, 2])
    with pytest.raises(InvalidParams, match="suffix"):
        complete(prompt=[1], suffix="b")


@pytest.mark.parametrize("given", [{}, {"text": "a", "messages": [USER]}])
def test_tokenize_takes_text_or_messages(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams, match="exactly one of text and messages"):
        decode_params(TokenizeParams, Raw(json.dumps({"model": "m", **given}).encode())).prompt()


@pytest.mark.parametrize(("field", "value"), [("kv_bits", 7), ("ttl_s", -1), ("pin", 1), ("draft", ""), ("adapter", 5)])
def test_load_options_are_checked(field: str, value: Any) -> None:
    with pytest.raises(InvalidParams, match=f"^{field}"):
        decode_params(LoadParams, Raw(json.dumps({"model": "m", field: value}).encode()))


def test_every_parameter_says_what_it_takes() -> None:
    for method in METHODS.values():
        for field in msgspec.structs.fields(method.params):
            assert field.type.__metadata__[-1].description, (method.name, field.name)
