"""The thinnest whole path: a request, a streamed answer, in both framings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import FakeBackend
from tests.rpc.peers import serving

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "tell me more"}]


@pytest.mark.parametrize("headers", [False, True])
async def test_ping_answers_pong(backend: FakeBackend, path: Path, headers: bool) -> None:
    async with serving(backend, path) as running, running.peer(headers=headers) as peer:
        assert await peer.ask("ping") == {"jsonrpc": "2.0", "result": "pong", "id": 1}


@pytest.mark.parametrize("headers", [False, True])
async def test_a_streamed_answer_is_the_whole_answer(backend: FakeBackend, path: Path, headers: bool) -> None:
    async with serving(backend, path) as running, running.peer(headers=headers) as peer:
        result = await peer.result("generate.chat", model="tiny", messages=MESSAGES, stream=True)
        values = [note["params"]["value"] for note in peer.notes]
        assert result["text"] == "tell me more" == "".join(value["text"] for value in values)
        assert [value["seq"] for value in values] == [0, 1, 2]
        assert {note["params"]["token"] for note in peer.notes} == {1}
