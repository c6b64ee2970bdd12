"""Every family's corpus through the real engine: what the model says becomes exactly these deltas and this result."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from itertools import groupby

import pytest

from omlxd.engine.api import Delta, GenerationResult, Progress
from omlxd.engine.job import make_job
from omlxd.engine.tools import KNOWN
from tests.engine.running import Running, engine
from tests.golden.corpus import Case, cases
from tests.golden.show import read

CASES = list(cases())


def merged(deltas: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """As a slow reader gets them: neighbours of one channel joined."""
    return [(channel, "".join(text for _, text in run)) for channel, run in groupby(deltas, key=lambda d: d[0])]


def run(case: Case, *, stream: bool) -> tuple[list[Delta | Progress], GenerationResult]:
    async def main() -> tuple[list[Delta | Progress], GenerationResult]:
        model = case.model()
        script = model.model
        async with engine(model) as running:
            request = replace(case.request(), stream=stream)
            prepared = await running.prepare(request)
            script.prompt_tokens = len(prepared.token_ids)
            job = make_job(request, prepared, running.facts, id=case.id, arrived=time.monotonic())
            answering = Running(running, job)
            events = await answering.events() if stream else []
            return events, await answering.result()

    return asyncio.run(main())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_deltas_come_as_soon_as_they_can_be_no_part_of_a_marker(case: Case) -> None:
    deltas, _ = read(case)
    assert tuple(deltas) == case.deltas


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_streamed_and_whole_answers_of_a_family_are_the_corpus_s(case: Case) -> None:
    events, streamed = run(case, stream=True)
    _, whole = run(case, stream=False)
    deltas = [(event.channel, event.text) for event in events if isinstance(event, Delta) and event.text]
    assert merged(deltas) == merged(list(case.deltas))
    for result in (streamed, whole):
        assert (result.text, result.reasoning or "") == (case.text("content"), case.text("reasoning"))
        assert result.finish_reason == case.finish
        assert [
            (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in result.tool_calls or ()
        ] == [tuple(call) for call in case.calls]
        assert len(result.malformed_calls) == len(case.malformed)
        for word, call in zip(case.malformed, result.malformed_calls, strict=True):
            assert word in call.reason
        assert result.usage.completion_tokens == len(result.token_ids)
    assert streamed.usage == whole.usage


def test_every_format_of_calls_has_a_corpus() -> None:
    calling = [case.model().tokenizer for case in CASES if case.calls and case.family != "gpt_oss"]
    assert {tokenizer.tool_parser.__module__.rpartition(".")[2] for tokenizer in calling} == set(KNOWN)
