"""CASES.md, topic E: what a client sees of an answer, where nothing else in the suite says it yet.

Elsewhere: leading spaces (ST-03) in test_text; stops in the reasoning (ST-07), opening marks in the prompt (ST-11),
calls with a closing mark in a string, cut or never closed (ST-13, 15, 16) and streamed against whole (ST-19) in the
golden corpora; blanks without end (ST-17) in test_steering; refused stops (ST-08) in tests/rpc.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlxd.engine.api import (
    Cancelled,
    Delta,
    GenerateRequest,
    GenerationResult,
    LoadOptions,
    OmlxError,
    Stopping,
    TextPrompt,
)
from omlxd.engine.catalog import CatalogEntry
from omlxd.engine.engine import Engine
from omlxd.engine.inbox import Close
from omlxd.engine.job import make_job
from omlxd.engine.loader import load
from omlxd.engine.model import LoadedModel, ModelFacts, SamplingDefaults
from omlxd.engine.stream import Event, EventStream
from tests.engine.running import Running, engine, job
from tests.golden.script import Piece, Script, family_tokenizer, ids_of
from tests.models import END_OF_TEXT, IM_END, IM_START, write


def speaker(tmp_path: Path, pieces: Sequence[Piece]) -> LoadedModel:
    own: TokenizerWrapper = family_tokenizer(tmp_path, {}, pieces, "")
    facts = ModelFacts("m", Path("/nowhere"), None, len(own), frozenset({IM_END}), False, 0)
    script = Script(ids_of(pieces, own), len(own))
    script.prompt_tokens = 3
    return LoadedModel(script, own, facts)


async def streamed(running: Engine, **changes: object) -> tuple[list[str], GenerationResult]:
    options = {"max_tokens": 99, "stream": True, "stop_ids": frozenset({IM_END}), **changes}
    each = Running(running, job([1, 2, 3], **options))
    events = [event.text for event in await each.events() if isinstance(event, Delta) and event.text]
    return events, await each.result()


def told(model: LoadedModel, **changes: object) -> tuple[list[str], GenerationResult]:
    async def main() -> tuple[list[str], GenerationResult]:
        async with engine(model) as running:
            return await streamed(running, **changes)

    return asyncio.run(main())


def test_characters_over_several_tokens_arrive_whole(tmp_path: Path) -> None:
    """ST-01."""
    text = "ok \U0001f44b \u4e2d\u6587!"
    deltas, result = told(speaker(tmp_path, [[byte] for byte in text.encode()]))
    assert "".join(deltas) == result.text == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert all(delta.encode() for delta in deltas)  # no half of a surrogate pair


def test_a_stop_string_over_two_tokens_ends_the_answer_before_it(tmp_path: Path) -> None:
    """ST-05."""
    deltas, result = told(speaker(tmp_path, ["alpha", " be", "ta gam", "ma delta", " and more"]), stop=["beta gamma"])
    assert "".join(deltas) == result.text == "alpha "
    assert not any("be" in delta for delta in deltas)
    assert result.finish_reason == "stop"
    assert result.usage.completion_tokens == 4  # the token that completed it is the last


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["stop", "x"], ["stop"], ""),  # in the first token
        (["a", "bc", "de"], ["cd", "bcd"], "a"),  # overlapping: of those that end together the longest
        (["ab", "abc"], ["abc"], "ab"),  # a beginning that turns out to be none
        (["xyz"], ["z" * 10_000], "xyz"),  # ST-08: ten kilobytes
        (["abcdefghijklmnopq"], [chr(97 + n) + "!" for n in range(16)], "abcdefghijklmnopq"),  # sixteen of them
    ],
)
def test_stop_strings_anywhere(tmp_path: Path, pieces: list[Piece], stop: list[str], text: str) -> None:
    deltas, result = told(speaker(tmp_path, pieces), stop=stop)
    assert "".join(deltas) == result.text == text


def test_any_of_a_model_s_end_tokens_ends_the_answer_and_is_not_in_it(tmp_path: Path) -> None:
    """ST-09: config.json knows one of them, generation_config.json another."""
    folder = write("llama", tmp_path / "m", eos=IM_END)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{IM_END}, {END_OF_TEXT}]}}')
    facts = load(CatalogEntry("m", folder, "llama", 1), LoadOptions(), progress=lambda _: None).facts
    assert facts.eos_token_ids == {IM_END, END_OF_TEXT}
    model = speaker(tmp_path / "s", ["a", "<|endoftext|>", "user: b"])
    _, result = told(model, stop_ids=facts.eos_token_ids)
    assert (result.text, result.finish_reason) == ("a", "stop")


def test_control_tokens_of_a_raw_text_are_not_shown(tmp_path: Path) -> None:
    model = speaker(tmp_path, ["a", "<|im_start|>", "b"])

    async def main() -> GenerationResult:
        async with engine(model) as running:
            request = GenerateRequest("m", TextPrompt("abc"))
            prepared = await running.prepare(request)
            return await Running(running, make_job(request, prepared, running.facts, id="r", arrived=0.0)).result()

    result = asyncio.run(main())
    assert result.text == "ab"
    assert IM_START in result.token_ids


@pytest.mark.parametrize("stop", ["<|im_start|>", "</t>"])
def test_a_stop_string_that_is_a_token_of_its_own_ends_the_answer(tmp_path: Path, stop: str) -> None:
    """Its text would never come by: control tokens have none, and marks are taken out."""
    own = family_tokenizer(tmp_path, {"</t>": False}, (), "")
    script = Script(ids_of(["a", stop, "b"], own), len(own))
    script.prompt_tokens = 3
    model = LoadedModel(script, own, ModelFacts("m", Path("/nowhere"), None, len(own), frozenset({IM_END}), False, 0))

    async def main() -> GenerationResult:
        async with engine(model) as running:
            request = GenerateRequest("m", TextPrompt("abc"), stopping=Stopping(stop=[stop], ignore_eos=True))
            prepared = await running.prepare(request)
            return await Running(running, make_job(request, prepared, running.facts, id="r", arrived=0.0)).result()

    result = asyncio.run(main())
    assert (result.text, result.finish_reason) == ("a", "stop")


def test_tokens_that_the_model_s_own_file_suppresses_are_never_said(tmp_path: Path) -> None:
    model = speaker(tmp_path, ["a", "b", "c"])
    defaults = SamplingDefaults(temperature=0.0, suppress_tokens=frozenset({ord("b")}))
    model = replace(model, facts=replace(model.facts, defaults=defaults))

    async def main() -> GenerationResult:
        async with engine(model) as running:
            request = GenerateRequest("m", TextPrompt("abc"), logprobs=5)
            prepared = await running.prepare(request)
            return await Running(running, make_job(request, prepared, running.facts, id="r", arrived=0.0)).result()

    result = asyncio.run(main())
    assert ord("b") not in result.token_ids
    assert all(top.token_id != ord("b") for entry in result.logprobs or () for top in entry.top)


@pytest.mark.parametrize("how", ["end", "length", "stop", "cancel", "failure"])
def test_there_is_one_end_with_the_usage_however_it_comes(tmp_path: Path, how: str) -> None:
    """ST-20: exactly one result or error, whose count of tokens is that of the ids kept."""
    model = speaker(tmp_path, ["one", " two", " three", " four"] * 3)
    ended: list[GenerationResult | OmlxError] = []

    class Counting(EventStream):
        def deliver(self, event: Event) -> None:
            if isinstance(event, GenerationResult | OmlxError):
                ended.append(event)
            super().deliver(event)

    async def main() -> None:
        async with engine(model) as running:
            changes = {"length": {"max_tokens": 3}, "stop": {"stop": ["three"]}}.get(how, {})
            asked = job([1, 2, 3], **{"max_tokens": 99, "stream": True, "stop_ids": frozenset({IM_END}), **changes})
            stream = Counting(lambda reason: running.abort(asked.id, reason))
            running.submit(asked, stream)
            if how == "cancel":
                async for _ in stream:
                    stream.cancel()
            if how == "failure":
                running.close(Close("shutdown"))
            await stream.wait_ended()

    asyncio.run(main())
    (end,) = ended
    result = end if isinstance(end, GenerationResult) else end.partial if isinstance(end, Cancelled) else None
    if result is not None:
        assert result.usage.completion_tokens == len(result.token_ids)
