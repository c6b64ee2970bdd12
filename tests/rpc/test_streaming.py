"""Notifications of a request that takes time: under which token, in which order, and to a reader that is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omlxd.engine.api import Delta, EngineFailed, GenerateRequest, Progress, TokenLogprob, Unsupported
from tests.fakes import FakeBackend, FakeGeneration, answering, refusing, result_of
from tests.rpc.peers import Peer, serving, until

pytestmark = pytest.mark.anyio
PROMPT = {"model": "tiny", "prompt": "one two three"}


def values(peer: Peer, kind: str) -> list[dict[str, Any]]:
    return [note["params"]["value"] for note in peer.notes if note["params"]["value"]["kind"] == kind]


def tokens(peer: Peer, kind: str) -> set[Any]:
    return {note["params"]["token"] for note in peer.notes if note["params"]["value"]["kind"] == kind}


def progressing(request: GenerateRequest) -> FakeGeneration:
    """Gives deltas and progress whatever was asked, as a careless engine might."""
    return answering("one two three", progress=[Progress("queued"), Progress("prefill", 1, 3, "half")])


async def test_a_request_without_stream_gets_its_answer_alone(backend: FakeBackend, path: Path) -> None:
    backend.script = progressing
    async with serving(backend, path) as running, running.peer() as peer:
        assert (await peer.result("generate.complete", **PROMPT))["text"] == "one two three"
        assert peer.notes == []
        assert not backend.requests[0].stream


@pytest.mark.parametrize("id_", ["a", 7])
async def test_stream_uses_the_id_as_token_for_deltas_and_progress(
    backend: FakeBackend, path: Path, id_: str | int
) -> None:
    backend.script = progressing
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send({**peer.request("generate.complete", **PROMPT, stream=True), "id": id_})
        await peer.answer()
        assert tokens(peer, "delta") == tokens(peer, "progress") == {id_}
        assert [value["phase"] for value in values(peer, "progress")] == ["queued", "prefill"]
        assert values(peer, "progress")[1] == {
            "kind": "progress",
            "phase": "prefill",
            "done": 1,
            "total": 3,
            "detail": "half",
        }


@pytest.mark.parametrize("token", ["t", 0, 99])
async def test_a_partial_result_token_gets_the_deltas_and_nothing_else(
    backend: FakeBackend, path: Path, token: str | int
) -> None:
    backend.script = progressing
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.result("generate.complete", **PROMPT, partialResultToken=token)
        assert tokens(peer, "delta") == {token}
        assert values(peer, "progress") == []
        assert (backend.requests[0].stream, backend.requests[0].progress) == (True, False)


async def test_a_work_done_token_gets_the_progress_and_nothing_else(backend: FakeBackend, path: Path) -> None:
    backend.script = progressing
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.result("generate.complete", **PROMPT, workDoneToken="w")
        assert tokens(peer, "progress") == {"w"}
        assert values(peer, "delta") == []
        assert (backend.requests[0].stream, backend.requests[0].progress) == (False, True)


async def test_deltas_are_numbered_without_gaps_and_precede_the_answer(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        result = await peer.result("generate.complete", **PROMPT, stream=True)
        deltas = values(peer, "delta")
        assert [delta["seq"] for delta in deltas] == [0, 1, 2]
        assert "".join(delta["text"] for delta in deltas) == result["text"]
        assert set(deltas[0]) == {"kind", "seq", "text", "channel"}


async def test_channels_are_told_apart(backend: FakeBackend, path: Path) -> None:
    def thinking(request: GenerateRequest) -> FakeGeneration:
        generation = FakeGeneration()
        generation.push(Delta("hm", "reasoning"))
        generation.push(Delta('{"a":', "tool_call"))
        generation.push(Delta("so", "content"))
        generation.finish(result_of("so", reasoning="hm", tool_calls=[{"id": "1"}], finish_reason="tool_calls"))
        return generation

    backend.script = thinking
    async with serving(backend, path) as running, running.peer() as peer:
        result = await peer.result("generate.complete", **PROMPT, stream=True)
        assert [delta["channel"] for delta in values(peer, "delta")] == ["reasoning", "tool_call", "content"]
        assert (result["reasoning"], result["tool_calls"]) == ("hm", [{"id": "1"}])


def with_ids(request: GenerateRequest) -> FakeGeneration:
    """Two tokens make one character; both have logprobs."""
    first, second = (TokenLogprob(i, "", -0.5, [TokenLogprob(i + 1, "b", -2.0)]) for i in (5, 6))
    generation = FakeGeneration()
    generation.push(Delta("", token_ids=[5], logprobs=[first]), merge=False)
    generation.push(Delta("é", token_ids=[6], logprobs=[second]), merge=False)
    generation.finish(result_of("é", token_ids=[5, 6], prompt_token_ids=[1, 2], logprobs=[first, second]))
    return generation


async def test_without_asking_there_are_no_ids_and_no_deltas_without_text(backend: FakeBackend, path: Path) -> None:
    backend.script = with_ids
    async with serving(backend, path) as running, running.peer() as peer:
        result = await peer.result("generate.complete", **PROMPT, stream=True)
        assert values(peer, "delta") == [{"kind": "delta", "seq": 0, "text": "é", "channel": "content"}]
        assert not {"token_ids", "prompt_token_ids", "logprobs", "reasoning", "tool_calls"} & set(result)


async def test_ids_come_when_they_are_asked_for(backend: FakeBackend, path: Path) -> None:
    backend.script = with_ids
    async with serving(backend, path) as running, running.peer() as peer:
        result = await peer.result("generate.complete", **PROMPT, stream=True, return_token_ids=True)
        assert [(delta["seq"], delta["token_ids"]) for delta in values(peer, "delta")] == [(0, [5]), (1, [6])]
        assert (result["token_ids"], result["prompt_token_ids"]) == ([5, 6], [1, 2])
        assert "logprobs" not in result


async def test_logprobs_come_when_they_are_asked_for(backend: FakeBackend, path: Path) -> None:
    backend.script = with_ids
    async with serving(backend, path) as running, running.peer() as peer:
        result = await peer.result("generate.complete", **PROMPT, stream=True, logprobs=1)
        assert backend.requests[0].logprobs == 1
        streamed = [entry for delta in values(peer, "delta") for entry in delta["logprobs"]]
        assert streamed == result["logprobs"]
        assert streamed[0] == {
            "token_id": 5,
            "text": "",
            "logprob": -0.5,
            "top": [{"token_id": 6, "text": "b", "logprob": -2.0}],
        }
        assert "token_ids" not in result


async def test_a_failure_in_the_middle_is_the_one_answer_after_the_deltas(backend: FakeBackend, path: Path) -> None:
    def failing(request: GenerateRequest) -> FakeGeneration:
        generation = FakeGeneration()
        generation.push(Delta("so far"))
        generation.fail(EngineFailed("tiny", "it broke"))
        return generation

    backend.script = failing
    async with serving(backend, path) as running, running.peer() as peer:
        error = await peer.error("generate.complete", **PROMPT, stream=True)
        assert error["code"] == -32020
        assert error["data"] == {"kind": "engine_failed", "model": "tiny", "reason": "it broke"}
        assert [delta["text"] for delta in values(peer, "delta")] == ["so far"]


async def test_a_refusal_is_a_typed_error(backend: FakeBackend, path: Path) -> None:
    backend.script = lambda request: refusing(Unsupported("thinking", "not by this model"))
    async with serving(backend, path) as running, running.peer() as peer:
        error = await peer.error("generate.complete", **PROMPT, stream=True, thinking={"enabled": True})
        assert (error["code"], error["data"]["what"]) == (-32021, "thinking")


@pytest.mark.parametrize("method", ["models.load", "models.pull"])
async def test_loading_and_pulling_tell_their_progress(backend: FakeBackend, path: Path, method: str) -> None:
    params = {"model": "tiny"} if method == "models.load" else {"source": "demo"}
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.result(method, **params, workDoneToken="w")
        assert values(peer, "progress")[-1]["done"] == values(peer, "progress")[-1]["total"]
        assert tokens(peer, "progress") == {"w"}


async def test_a_slow_reader_gets_fewer_longer_deltas_and_holds_up_nobody(backend: FakeBackend, path: Path) -> None:
    slow = FakeGeneration()
    text = "word " * 200  # 1000 bytes, several thousand times: more than any socket holds
    backend.script = lambda request: slow if request.stream else answering("quick")
    async with serving(backend, path) as running, running.peer() as reader, running.peer() as other:
        await reader.send(reader.request("generate.complete", **PROMPT, stream=True))
        await until(lambda: backend.requests)
        for round_ in range(5000):
            slow.push(Delta(text))
            if round_ % 100 == 0:
                assert (await other.result("generate.complete", **PROMPT))["text"] == "quick"
        assert slow.most_pending == 1
        slow.finish(result_of(slow.produced))
        result = (await reader.answer())["result"]
        deltas = values(reader, "delta")
        assert "".join(delta["text"] for delta in deltas) == result["text"] == text * 5000
        assert [delta["seq"] for delta in deltas] == list(range(len(deltas)))
        assert len(deltas) < 5000
