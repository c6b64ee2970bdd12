"""What JSON-RPC's envelope has to be, and what comes back when it is something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.rpc.connection import RpcLimits
from omlxd.rpc.envelope import Request, leading_id, read_frame
from tests.fakes import FakeBackend
from tests.rpc.peers import Peer, serving

pytestmark = pytest.mark.anyio


async def refusal(peer: Peer, frame: bytes) -> tuple[int, Any]:
    """Code and id of the answer to `frame`; the connection must answer a ping after it."""
    await peer.send(frame)
    answer = await peer.answer()
    assert "result" not in answer
    assert answer["error"]["data"]["kind"]
    assert await peer.result("ping") == "pong"
    return answer["error"]["code"], answer["id"]


BAD = [
    (b"{", (-32700, None)),
    (b"[]", (-32600, None)),
    (b"5", (-32600, None)),
    (b'"ping"', (-32600, None)),
    (b"null", (-32600, None)),
    (b'{"jsonrpc":"1.0","id":4,"method":"ping"}', (-32600, 4)),
    (b'{"id":4,"method":"ping"}', (-32600, 4)),
    (b'{"jsonrpc":"2.0","id":4,"method":1}', (-32600, 4)),
    (b'{"jsonrpc":"2.0","id":4}', (-32600, 4)),
    (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', (-32600, None)),
    (b'{"jsonrpc":"2.0","id":[1],"method":"ping"}', (-32600, None)),
    (b'{"jsonrpc":"2.0","id":4,"method":"nothing.of.that"}', (-32601, 4)),
    (b'{"jsonrpc":"2.0","id":4,"method":"cache.statistics"}', (-32601, 4)),
    (b'{"jsonrpc":"2.0","id":4,"method":"ping","params":"x"}', (-32602, 4)),
    (b'{"jsonrpc":"2.0","id":4,"method":"ping","params":[1]}', (-32602, 4)),
    (b'{"jsonrpc":"2.0","id":4,"method":"tokenize"}', (-32602, 4)),
    (b'{"jsonrpc":"2.0","id":4,"method":"tokenize","params":{"model":5,"text":""}}', (-32602, 4)),
    (b'{"jsonrpc":"2.0","id":4,"method":"ping","params":{"a":NaN}}', (-32700, 4)),
    (b'{"jsonrpc":"2.0","id":4,"method":"ping"} {}', (-32700, 4)),
    (b'{"jsonrpc":"2.0","id":4,"method":"\xff"}', (-32700, 4)),
    (b'{"jsonrpc":"2.0","method":"ping","params":{"a":NaN},"id":4}', (-32700, None)),
    (b'[{"jsonrpc":"2.0","id":4,"method":"ping"},', (-32700, None)),
    (b'{"a":' * 100_000, (-32700, None)),
    (b"[" * 100_000, (-32700, None)),
    (b'{"a":"\\ud800"}', (-32700, None)),
]


async def test_half_a_surrogate_pair_is_refused_in_words_and_with_the_id(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as server, server.peer() as peer:
        await peer.send(b'{"jsonrpc":"2.0","id":4,"method":"ping","params":{"a":"cut \\ud83d"}}')
        answer = await peer.answer()
        assert (answer["error"]["code"], answer["id"]) == (-32700, 4)
        assert "byte 59 begins an escape that is half of a surrogate pair" in answer["error"]["message"]


@pytest.mark.parametrize("headers", [False, True])
@pytest.mark.parametrize(("frame", "expected"), BAD, ids=range(len(BAD)))
async def test_a_bad_request_is_refused_and_the_connection_lives(
    backend: FakeBackend, path: Path, frame: bytes, expected: tuple[int, Any], headers: bool
) -> None:
    async with serving(backend, path) as running, running.peer(headers=headers) as peer:
        assert await refusal(peer, frame) == expected


@pytest.mark.parametrize(
    "id_", ["1", "-7", "1.5", "1e3", "null", '"a"', '""', '"1"', '"\\u00e9\\n"', "9007199254740993", "1" + "0" * 60]
)
async def test_an_id_comes_back_as_the_json_it_was(backend: FakeBackend, path: Path, id_: str) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(b'{"id": %b ,"jsonrpc":"2.0","method":"ping"}' % id_.encode())
        line = await peer.stream.receive()
        assert json.loads(line) == {"jsonrpc": "2.0", "result": "pong", "id": json.loads(id_)}
        assert b'"id":%b' % id_.encode() in line


@pytest.mark.parametrize("params", [b"", b',"params":{}', b',"params":[]', b',"params":[ ]', b',"params":null'])
async def test_no_parameters_may_be_said_in_four_ways(backend: FakeBackend, path: Path, params: bytes) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(b'{"jsonrpc":"2.0","id":1,"method":"daemon.info"%b}' % params)
        assert (await peer.answer())["result"]["protocol"] == 1


async def test_an_unknown_member_of_the_envelope_is_ignored(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send({**peer.request("ping"), "meta": {"x": [1]}})
        assert (await peer.answer())["result"] == "pong"


async def test_a_notification_gets_no_answer_even_when_it_is_wrong(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(
            {"jsonrpc": "2.0", "method": "ping"},
            {"jsonrpc": "2.0", "method": "nothing"},
            {"jsonrpc": "2.0", "method": "tokenize", "params": {"model": 1}},
            peer.request("ping"),
        )
        assert (await peer.read())["id"] == 1


async def test_a_response_is_not_answered(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send({"jsonrpc": "2.0", "id": 9, "result": 1}, peer.request("ping"))
        assert (await peer.read())["id"] == 1


@pytest.mark.parametrize("headers", [False, True])
async def test_a_batch_is_answered_member_by_member(backend: FakeBackend, path: Path, headers: bool) -> None:
    async with serving(backend, path) as running, running.peer(headers=headers) as peer:
        await peer.send(
            [
                {"jsonrpc": "2.0", "id": 1, "method": "ping"},
                {"jsonrpc": "2.0", "method": "ping"},
                5,
                {"jsonrpc": "2.0", "id": "b", "method": "nothing"},
                {"jsonrpc": "2.0", "id": 3, "method": "generate.complete", "params": {"model": "tiny", "prompt": "a"}},
            ]
        )
        answers = {answer["id"]: answer for answer in await peer.answer()}
        assert answers[1]["result"] == "pong"
        assert answers[None]["error"]["code"] == -32600
        assert answers["b"]["error"]["code"] == -32601
        assert answers[3]["result"]["text"] == "a"
        assert len(answers) == 4


async def test_other_clients_have_their_turns_beside_a_huge_batch(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as greedy, running.peer() as other:
        answered: list[int] = []

        async def wait() -> None:
            answered.append(len(await greedy.answer()))

        await greedy.send([greedy.request("ping") for _ in range(2000)])
        turns = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            while not answered:
                assert await other.result("ping") == "pong"
                turns += 1
        assert answered == [2000]
        assert turns > 50  # side by side, all of the batch would come before each of them


async def test_a_batch_of_notifications_gets_no_answer(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send([{"jsonrpc": "2.0", "method": "ping"}] * 3, peer.request("ping"))
        assert (await peer.read())["id"] == 1


@pytest.mark.parametrize("headers", [False, True])
async def test_an_oversized_frame_is_refused_with_its_id_and_skipped(
    backend: FakeBackend, path: Path, headers: bool
) -> None:
    async with (
        serving(backend, path, RpcLimits(max_frame_bytes=2000)) as running,
        running.peer(headers=headers) as peer,
    ):
        frame = b'{"jsonrpc":"2.0","id":"big","method":"tokenize","params":{"text":"%b"}}' % (b"x" * 300_000)
        assert await refusal(peer, frame) == (-32600, "big")


async def test_a_header_without_a_length_ends_the_connection_after_saying_so(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer(headers=True) as peer:
        await peer.stream.send(b"Content-Type: x\r\n\r\n{}")
        assert (await peer.answer())["error"]["code"] == -32700
        assert await peer.at_end()


async def test_large_frames_pass_both_ways(backend: FakeBackend, path: Path) -> None:
    prompt = "x" * 3_000_000
    async with serving(backend, path) as running, running.peer() as peer:
        assert (await peer.result("generate.complete", model="tiny", prompt=prompt))["text"] == prompt


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["jsonrpc", "id", "method", "params", "x"]), inner),
)


@given(frame=st.binary(min_size=1) | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_the_bytes_are_they_are_read_or_refused(frame: bytes) -> None:
    for member in read_frame(frame).members:
        assert isinstance(member, Request) or (member.error.code in (-32700, -32600) and json.loads(member.id) != [])


def test_the_id_of_half_a_request_is_found_only_where_it_is_surely_its_own() -> None:
    assert leading_id(b'{"jsonrpc":"2.0","id":12,"method"') == b"12"
    assert leading_id(b'{ "method" : "ping", "id" : "a" , "par') == b'"a"'
    assert leading_id(b'{"id":1') == b"null"
    assert leading_id(b'{"params":{"id":1,"x":"') == b"null"
    assert leading_id(b'{"jsonrpc":"2.0","params":[],"id":1,') == b"null"
