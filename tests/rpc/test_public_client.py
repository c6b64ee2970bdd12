"""The client that programs use, blocking and asyncio: each method by name, answers, and what a lost connection means.

Both run against the real server over a fake backend, on a loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec
import pytest
from anyio.from_thread import BlockingPortal

from omlxd.engine import api
from omlxd.engine.api import Delta, GenerateRequest, LoadOptions, Progress
from omlxd.rpc import aclient, client, params, shapes, wire
from omlxd.rpc.client import ClientClosed, ConnectionLost, NotRunning, RpcError, connect
from tests.fakes import FakeBackend, FakeGeneration, answering, serving_in_thread

MESSAGES: Final = [{"role": "user", "content": "one two three"}]
LOAD: Final = [{"kind": "progress", "phase": "load", "done": n, "total": 2} for n in (1, 2)]


@pytest.fixture
def at(backend: FakeBackend, path: Path) -> Iterator[str]:
    with serving_in_thread(backend, path):
        yield str(path)


class Scripted:
    """A backend whose answers the test writes, from its own thread."""

    def __init__(self, path: Path) -> None:
        self.backend = FakeBackend(script=self._begin)
        self.generations: list[FakeGeneration] = []
        self.portal: BlockingPortal
        self.path = str(path)
        self._begun = threading.Condition()

    def _begin(self, request: GenerateRequest) -> FakeGeneration:
        with self._begun:
            self.generations.append(FakeGeneration())
            self._begun.notify_all()
        return self.generations[-1]

    def say(self, *words: str, of: int = 0) -> None:
        """The words of the answer with that number, when it has begun."""
        with self._begun:
            assert self._begun.wait_for(lambda: len(self.generations) > of, 10)
        for word in words:
            self.portal.call(self.generations[of].push, Delta(word))


@pytest.fixture
def scripted(path: Path) -> Iterator[Scripted]:
    scripted = Scripted(path)
    with serving_in_thread(scripted.backend, path) as scripted.portal:
        yield scripted


# -- by name ----------------------------------------------------------------------------------------------------------


def test_every_method_has_its_name(at: str, backend: FakeBackend) -> None:
    with connect(at) as omlx:
        assert omlx.ping() == "pong"
        assert omlx.info()["pid"] == 42
        assert omlx.status()["models"] == omlx.models()
        assert omlx.load("tiny", pin=True)["state"] == "READY"
        assert omlx.unload("tiny", now=True)["freed_bytes"] == 1000
        assert omlx.pull("demo", name="mine")["name"] == "mine"
        assert omlx.tokenize("tiny", "é") == {"tokens": [195, 169], "count": 2}
        assert omlx.tokenize("tiny", MESSAGES)["count"] > 2
        assert omlx.detokenize("tiny", [195, 169]) == {"text": "é"}
        omlx.shutdown(grace_s=3)
    assert backend.loads == [("tiny", LoadOptions(pin=True))]
    assert backend.pulls == [("demo", "mine")]
    assert backend.shutdowns == [3]


def test_the_asyncio_client_has_every_method_too(at: str) -> None:
    async def ask() -> None:
        async with aclient.connect(at) as omlx:
            assert await omlx.ping() == "pong"
            assert (await omlx.info())["pid"] == 42
            assert (await omlx.status())["models"] == await omlx.models()
            assert (await omlx.load("tiny", pin=True))["state"] == "READY"
            assert (await omlx.unload("tiny", now=True))["freed_bytes"] == 1000
            assert (await omlx.pull("demo", name="mine"))["name"] == "mine"
            assert await omlx.tokenize("tiny", "é") == {"tokens": [195, 169], "count": 2}
            assert await omlx.detokenize("tiny", [195, 169]) == {"text": "é"}
            await omlx.shutdown(grace_s=3)

    asyncio.run(ask())


def test_both_clients_take_the_same_arguments() -> None:
    """But for the time limit: asyncio has its own."""

    def methods(of: type) -> dict[str, Any]:
        found = {name: inspect.signature(member) for name, member in vars(of).items() if inspect.isfunction(member)}
        return {name: [*map(str, found[name].parameters.values())] for name in found if not name.startswith("_")}

    blocking, eventual = methods(client.Client), methods(aclient.Client)
    blocking["call"].remove("timeout_s: 'float | None' = None")
    del blocking["read"]  # the asyncio one has a task that reads
    assert blocking == eventual


def test_a_chat_is_read_as_it_comes_and_then_whole(at: str) -> None:
    with connect(at) as omlx:
        answer = omlx.chat("tiny", MESSAGES, temperature=0)
        assert [delta["text"] for delta in answer] == ["one", " two", " three"]
        assert answer.result()["text"] == "one two three"
        assert omlx.complete("tiny", "four").result()["text"] == "four"


def test_a_chat_is_read_as_it_comes_by_asyncio(at: str) -> None:
    async def ask() -> None:
        async with aclient.connect(at) as omlx:
            answer = omlx.chat("tiny", MESSAGES, temperature=0)
            assert [delta["text"] async for delta in answer] == ["one", " two", " three"]
            assert (await answer.result())["text"] == "one two three"
            both = await asyncio.gather(*(omlx.complete("tiny", text).result() for text in ("four", "five")))
            assert [result["text"] for result in both] == ["four", "five"]

    asyncio.run(ask())


def test_what_is_given_is_what_the_daemon_gets(at: str, backend: FakeBackend) -> None:
    with connect(at) as omlx:
        omlx.chat("tiny", MESSAGES, max_tokens=5, stop=["x"], logit_bias={"7": 1.5}, seed=3).result()
    (request,) = backend.requests
    assert (request.stopping.max_tokens, request.stopping.stop) == (5, ["x"])
    assert (request.sampling.logit_bias, request.sampling.seed) == ({7: 1.5}, 3)


def test_progress_goes_to_who_wants_it(at: str, backend: FakeBackend) -> None:
    backend.script = lambda request: answering("hi", progress=[Progress("prefill", 1, 3)])
    seen: list[Any] = []
    with connect(at) as omlx:
        omlx.load("tiny", on_progress=seen.append)
        assert seen[-1] == LOAD[-1]
        assert [delta["text"] for delta in omlx.chat("tiny", MESSAGES, on_progress=seen.append)] == ["hi"]
    assert seen[-1]["phase"] == "prefill"


def test_a_refusal_is_raised_by_the_loop_with_its_kind(at: str) -> None:
    with connect(at) as omlx, pytest.raises(RpcError) as caught:
        list(omlx.chat("tinny", MESSAGES))
    assert (caught.value.code, caught.value.kind) == (-32010, "model_not_found")
    assert caught.value.data["did_you_mean"] == ["tiny"]


def test_a_refusal_is_raised_by_the_loop_of_asyncio_too(at: str) -> None:
    async def ask() -> None:
        async with aclient.connect(at) as omlx:
            async for _ in omlx.chat("tinny", MESSAGES):
                pytest.fail("nothing can come")

    with pytest.raises(RpcError, match="tinny"):
        asyncio.run(ask())


# -- stopping ---------------------------------------------------------------------------------------------------------


def test_a_cancelled_answer_ends_and_keeps_what_there_was(scripted: Scripted) -> None:
    with connect(scripted.path) as omlx:
        answer = omlx.chat("tiny", MESSAGES)
        scripted.say("one", " two")
        seen = ""
        for delta in answer:
            seen += delta["text"]
            if seen == "one two":
                answer.cancel()
        result = answer.result()
        assert (result["text"], result["finish_reason"]) == ("one two", "cancelled")
        assert answer.result() == result
        assert omlx.ping() == "pong"


def test_an_answer_that_is_left_is_cancelled(scripted: Scripted) -> None:
    with connect(scripted.path) as omlx:
        with omlx.chat("tiny", MESSAGES) as answer:
            scripted.say("one")
            next(iter(answer))
        assert answer.result()["finish_reason"] == "cancelled"


def test_an_answer_that_ended_is_left_alone(at: str) -> None:
    with connect(at) as omlx, omlx.chat("tiny", MESSAGES) as answer:
        assert answer.result()["finish_reason"] == "stop"


def test_somebody_elses_cancel_is_an_error(scripted: Scripted) -> None:
    with connect(scripted.path) as omlx:
        answer = omlx.chat("tiny", MESSAGES)
        scripted.say("one")
        scripted.portal.call(scripted.generations[0].cancel, "model unloaded")
        with pytest.raises(RpcError) as caught:
            answer.result()
    assert (caught.value.kind, caught.value.partial["text"]) == ("cancelled", "one")


def test_leaving_and_cancelling_work_with_asyncio(scripted: Scripted) -> None:
    async def ask() -> None:
        async with aclient.connect(scripted.path) as omlx:
            async with omlx.chat("tiny", MESSAGES) as left:
                pass
            assert (await left.result())["finish_reason"] == "cancelled"
            answer = omlx.chat("tiny", MESSAGES)
            answer.cancel()  # of nothing: it was never sent
            async with answer:
                await asyncio.to_thread(scripted.say, "one", of=1)
                async for _ in answer:
                    answer.cancel()
            assert (await answer.result())["text"] == "one"

    asyncio.run(ask())


def test_a_cancelled_task_cancels_its_request(scripted: Scripted) -> None:
    async def ask() -> None:
        async with aclient.connect(scripted.path) as omlx:
            waiting = asyncio.create_task(omlx.call("generate.chat", {"model": "tiny", "messages": MESSAGES}))
            await asyncio.to_thread(scripted.say, "one")
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            assert await omlx.ping() == "pong"
            assert scripted.generations[0].is_cancelled

    asyncio.run(ask())


# -- a lost connection ------------------------------------------------------------------------------------------------


def test_after_a_restart_the_next_request_connects_again(path: Path) -> None:
    with serving_in_thread(FakeBackend(), path):
        omlx = connect(str(path))
        assert omlx.ping() == "pong"
    path.unlink()
    with omlx:
        for _ in range(2):
            with pytest.raises(NotRunning):
                omlx.ping()
        with serving_in_thread(FakeBackend(), path):
            assert omlx.ping() == "pong"


def test_after_a_restart_asyncio_connects_again(path: Path) -> None:
    async def ask() -> None:
        async with aclient.connect(str(path)) as omlx:
            assert await omlx.ping() == "pong"
            first.__exit__(None, None, None)
            path.unlink()
            with pytest.raises(NotRunning):
                await omlx.ping()
            with serving_in_thread(FakeBackend(), path):
                assert [await omlx.ping(), *await asyncio.gather(omlx.ping(), omlx.ping())] == ["pong"] * 3

    first = serving_in_thread(FakeBackend(), path)
    first.__enter__()
    asyncio.run(ask())


class Hanging:
    """A daemon that takes connections and hangs up when it is told to."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.requests = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for reply in (b"", b'{"jsonrpc":"2.0","id":null,"error":{"code":-32013,"message":"no room"}}\n', b"pong"):
            connected, _ = self._listener.accept()
            with connected:
                if reply == b"pong":
                    with connected.makefile("rb") as lines:
                        lines.readline()
                        self.requests += 1
                        connected.sendall(b'{"jsonrpc":"2.0","id":1,"result":"pong"}\n')
                elif reply:
                    connected.sendall(reply)
                else:
                    connected.recv(1000)
                    self.requests += 1

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


def test_a_request_under_way_is_lost_once_and_never_sent_again(path: Path) -> None:
    daemon = Hanging(path)
    with connect(str(path)) as omlx:
        answer = omlx.chat("tiny", MESSAGES)
        with pytest.raises(ConnectionLost, match="closed the connection"):
            answer.result()
        with pytest.raises(ConnectionLost):
            list(answer)
        answer.cancel()
        with pytest.raises(RpcError, match="no room"):  # who turns us away says why, and that is what is told
            omlx.ping()
        assert omlx.ping() == "pong"
    daemon.close()
    assert daemon.requests == 2


def test_asyncio_loses_a_request_once_and_never_sends_it_again(path: Path) -> None:
    async def ask() -> None:
        async with aclient.connect(str(path)) as omlx:
            with pytest.raises(ConnectionLost, match="closed the connection"):
                await omlx.chat("tiny", MESSAGES).result()
            with pytest.raises(RpcError, match="no room"):
                await omlx.ping()
            assert await omlx.ping() == "pong"

    daemon = Hanging(path)
    asyncio.run(ask())
    daemon.close()
    assert daemon.requests == 2


def test_a_closed_client_says_so(at: str) -> None:
    omlx = connect(at)
    omlx.close()
    omlx.close()
    for use in (omlx.ping, omlx.read, lambda: omlx.notify("exit")):
        with pytest.raises(ClientClosed, match=r"connect\(\)"):
            use()


def test_closing_ends_what_waits_with_asyncio(scripted: Scripted) -> None:
    async def ask() -> None:
        async with aclient.connect(scripted.path) as omlx:
            waiting = asyncio.create_task(omlx.chat("tiny", MESSAGES).result())
            await asyncio.to_thread(scripted.say, "one")
        with pytest.raises(ClientClosed):
            await waiting
        with pytest.raises(ClientClosed):
            await omlx.ping()

    asyncio.run(ask())


def test_with_asyncio_a_listener_that_fails_leaves_nobody_waiting(path: Path) -> None:
    def fail(method: str, params: object) -> None:
        raise ValueError(method)

    def serve() -> None:
        connected, _ = listener.accept()
        with connected:
            connected.recv(1000)
            connected.sendall(b'{"jsonrpc":"2.0","method":"event"}\n')
            assert connected.recv(1000) == b"", "the client hangs up"

    async def ask() -> None:
        async with aclient.connect(str(path), on_notification=fail) as omlx:
            with pytest.raises(ConnectionLost, match="no longer read"):
                await omlx.ping()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(ValueError, match="event"):  # as the blocking client does it, only later
            asyncio.run(ask())
        server.join()


def test_without_a_path_the_environment_says_where(at: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMLXD_SOCKET", at)
    with connect() as omlx:
        assert omlx.ping() == "pong"
    monkeypatch.delenv("OMLXD_SOCKET")
    monkeypatch.setenv("OMLXD_HOME", str(path.parent / "nowhere"))
    with pytest.raises(NotRunning, match=r"nowhere/omlxd\.sock: there is no socket"):
        connect()


# -- types ------------------------------------------------------------------------------------------------------------

RESULTS: Final = {
    shapes.ModelLine: wire.ModelLine,
    shapes.UnloadedLine: wire.UnloadedLine,
    shapes.Status: wire.Status,
    shapes.DaemonInfo: api.DaemonInfo,
    shapes.RequestInfo: api.RequestInfo,
    shapes.Usage: api.Usage,
    shapes.Timings: api.Timings,
    shapes.Generated: wire.Generated,
    shapes.MalformedCall: api.MalformedCall,
    shapes.Delta: wire.DeltaValue,
    shapes.Progress: wire.ProgressValue,
    shapes.LogprobEntry: wire.LogprobEntry,
    shapes.TopLogprob: wire.TopLogprob,
    shapes.Tokens: wire.Tokens,
    shapes.Detokenized: wire.Detokenized,
}


def described(kind: Any) -> Mapping[str, Any]:
    """The JSON schema of each field, with what is referred to in its place and without words."""
    schema, components = msgspec.json.schema_components([kind])

    def plain(node: Any) -> Any:
        if isinstance(node, list):
            return [plain(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return plain(components[node["$ref"].rsplit("/")[-1]])
        words = ("title", "description", "default", "required")
        return {key: plain(value) for key, value in node.items() if key not in words or isinstance(value, dict)}

    return dict(plain(schema[0])["properties"])


@pytest.mark.parametrize("shape", RESULTS, ids=lambda shape: shape.__name__)
def test_results_are_typed_as_they_are_sent(shape: Any) -> None:
    assert described(shape) == described(RESULTS[shape])


@pytest.mark.parametrize(
    ("shape", "takes", "named"),
    [
        (shapes.ChatOptions, params.ChatParams, {"model", "messages"}),
        (shapes.CompleteOptions, params.CompleteParams, {"model", "prompt"}),
        (shapes.LoadOptions, params.LoadParams, {"model"}),
    ],
)
def test_options_are_those_that_the_daemon_takes(shape: type, takes: type, named: set[str]) -> None:
    own = {"stream", "workDoneToken", "partialResultToken"}  # what the client sets itself
    assert {*get_type_hints(shape), *named, *own} == {field.encode_name for field in msgspec.structs.fields(takes)}
