"""Stopping a request: by id, by token, early, late, twice, and only one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from omlxd.engine.api import Cancelled, Delta, GenerateRequest
from tests.fakes import FakeBackend, FakeGeneration, refusing
from tests.rpc.peers import serving, until

pytestmark = pytest.mark.anyio
PROMPT = {"model": "tiny", "prompt": "one"}


class Endless(FakeBackend):
    """Its generations say one word and go on until they are cancelled."""

    def __init__(self) -> None:
        super().__init__(script=self.start)
        self.generations: list[FakeGeneration] = []

    def start(self, request: GenerateRequest) -> FakeGeneration:
        generation = FakeGeneration()
        generation.push(Delta("hello"))
        self.generations.append(generation)
        return generation


def lsp_cancel(**params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": "$/cancelRequest", "params": params}


async def test_a_cancelled_request_is_answered_once_with_what_there_was(path: Path) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(peer.request("generate.complete", **PROMPT, stream=True))
        assert (await peer.read())["params"]["value"]["text"] == "hello"
        await peer.send(lsp_cancel(id=1))
        answer = await peer.answer()
        assert (answer["id"], answer["error"]["code"]) == (1, -32800)
        data = answer["error"]["data"]
        assert data["kind"] == "cancelled"
        assert (data["partial"]["text"], data["partial"]["finish_reason"]) == ("hello", "cancelled")
        assert data["partial"]["usage"]
        assert "token_ids" not in data["partial"]
        assert (await peer.ask("ping"))["result"] == "pong"


@pytest.mark.parametrize("id_", [1, "one", 10**40])
async def test_the_cancel_method_says_whether_there_was_something_to_stop(path: Path, id_: Any) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send({**peer.request("generate.complete", **PROMPT, return_token_ids=True), "id": id_})
        await until(lambda: backend.generations)
        await peer.send({"jsonrpc": "2.0", "id": "c", "method": "cancel", "params": {"id": id_}})
        answers = {answer["id"]: answer for answer in (await peer.answer(), await peer.answer())}
        assert answers["c"]["result"] is True
        assert answers[id_]["error"]["data"]["partial"]["token_ids"] == []
        assert await peer.result("cancel", id=id_) is False


@pytest.mark.parametrize("parameter", ["partialResultToken", "workDoneToken"])
async def test_a_token_stops_its_request_too(path: Path, parameter: str) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(peer.request("generate.complete", **PROMPT, **{parameter: "t"}))
        await until(lambda: backend.generations)
        await peer.send({"jsonrpc": "2.0", "id": "c", "method": "cancel", "params": {"token": "t"}})
        answers = {answer["id"]: answer for answer in (await peer.answer(), await peer.answer())}
        assert answers["c"]["result"] is True
        assert answers[1]["error"]["code"] == -32800


@pytest.mark.parametrize("by", [{"id": 1}, {"token": "t"}])
async def test_a_cancel_in_the_same_write_is_answered_with_an_empty_partial(path: Path, by: dict[str, Any]) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(peer.request("generate.complete", **PROMPT, workDoneToken="t"), lsp_cancel(**by))
        error = (await peer.answer())["error"]
        assert error["code"] == -32800
        assert {"text", "usage", "finish_reason"} <= set(error["data"]["partial"])
        assert all(generation.is_cancelled for generation in backend.generations)


async def test_late_double_and_unknown_cancels_are_harmless(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.result("generate.complete", **PROMPT)
        await peer.send(lsp_cancel(id=1), lsp_cancel(id=1), lsp_cancel(id="x"), lsp_cancel(), lsp_cancel(id={}))
        assert await peer.result("cancel", id=12345) is False
        assert await peer.result("cancel", token="none") is False


async def test_two_cancels_at_once_give_one_answer(path: Path) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(peer.request("generate.complete", **PROMPT))
        await until(lambda: backend.generations)
        await peer.send(lsp_cancel(id=1), lsp_cancel(id=1), peer.request("ping"))
        assert {(await peer.read())["id"], (await peer.read())["id"]} == {1, 2}
        assert (await peer.ask("ping"))["id"] == 3


async def test_another_connection_cannot_cancel(path: Path) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer, running.peer() as other:
        await peer.send(peer.request("generate.complete", **PROMPT))
        await until(lambda: backend.generations)
        assert await other.result("cancel", id=1) is False
        assert not backend.generations[0].is_cancelled


@pytest.mark.parametrize("params", [{}, {"id": 1, "token": "t"}])
async def test_cancel_wants_exactly_one_name(backend: FakeBackend, path: Path, params: dict[str, Any]) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        assert (await peer.error("cancel", **params))["code"] == -32602


@pytest.mark.parametrize("more", [{}, {"workDoneToken": "w"}])
async def test_a_load_can_be_cancelled(backend: FakeBackend, path: Path, more: dict[str, Any]) -> None:
    backend.load_gate = anyio.Event()
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(peer.request("models.load", model="tiny", **more))
        await until(lambda: backend.loads)
        await peer.send(lsp_cancel(id=1))
        error = (await peer.answer())["error"]
        assert (error["code"], error["data"]) == (-32800, {"kind": "cancelled", "partial": None})
        assert backend.given_up == 1


async def test_the_engine_may_cancel_with_a_reason(backend: FakeBackend, path: Path) -> None:
    backend.script = lambda request: refusing(Cancelled(None, "model unloaded"))
    async with serving(backend, path) as running, running.peer() as peer:
        error = await peer.error("generate.complete", **PROMPT)
        assert error["data"] == {"kind": "cancelled", "partial": None, "reason": "model unloaded"}


async def test_a_member_of_a_batch_can_be_cancelled(path: Path) -> None:
    backend = Endless()
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send([peer.request("generate.complete", **PROMPT), peer.request("ping")])
        await until(lambda: backend.generations)
        await peer.send(lsp_cancel(id=1))
        answers = {answer["id"]: answer for answer in await peer.answer()}
        assert answers[1]["error"]["code"] == -32800
        assert answers[2]["result"] == "pong"
