"""`cache.stats`, `cache.explain`, `cache.warm` and `cache.clear` on the wire."""

from __future__ import annotations

from pathlib import Path

import pytest

from omlxd.engine.api import ChatPrompt, Progress, TextPrompt, TokenPrompt, Unsupported
from tests.fakes import FakeBackend, FakeGeneration, entry, refusing
from tests.rpc.peers import serving, until

pytestmark = pytest.mark.anyio


async def test_stats_have_one_line_for_each_model(backend: FakeBackend, path: Path) -> None:
    backend.models["other"] = entry("other")
    async with serving(backend, path) as running, running.peer() as peer:
        assert [line["model"] for line in await peer.result("cache.stats")] == ["tiny", "other"]
        assert await peer.result("cache.stats", model="tiny") == [
            {
                "model": "tiny",
                "hits": 3,
                "misses": 1,
                "tokens_matched": 6000,
                "tokens_computed": 2000,
                "blocks": {"hot": 24, "ssd": 0},
                "checkpoints": 2,
                "bytes": {"hot": 98_000_000, "ssd": 0},
                "evictions": 5,
                "writes_dropped": 0,
                "bad_blocks": 0,
            }
        ]
        assert (await peer.error("cache.stats", model="tony"))["data"]["did_you_mean"] == ["tiny"]


async def test_explain_shows_both_sides_of_the_first_difference(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        assert await peer.result("cache.explain", model="tiny", prompt="hello") == {
            "prompt_tokens": 5,
            "matched_tokens": 5,
            "reason": "full",
        }
        assert await peer.result("cache.explain", model="tiny", prompt="hello mars") == {
            "prompt_tokens": 10,
            "matched_tokens": 6,
            "reason": "differs",
            "differs_at": {"token": 6, "stored_text": "hello world", "prompt_text": "hello mars"},
        }


@pytest.mark.parametrize("method", ["cache.explain", "cache.warm"])
async def test_a_prompt_is_messages_or_a_prompt_and_never_both(backend: FakeBackend, path: Path, method: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with serving(backend, path) as running, running.peer() as peer:
        for given in ({}, {"messages": messages, "prompt": "hi"}):
            error = await peer.error(method, model="tiny", **given)
            assert (error["code"], error["data"]["field"]) == (-32602, "messages")
        bad = await peer.error(method, model="tiny", messages=[{"role": "user", "content": 7}])
        assert bad["code"] == -32602


async def test_warm_is_a_request_that_generates_nothing(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        assert await peer.result("cache.warm", model="tiny", prompt="hello") == {"prompt_tokens": 5, "cached_tokens": 2}
        await peer.result("cache.warm", model="tiny", messages=[{"role": "user", "content": "hi"}])
        await peer.result("cache.warm", model="tiny", prompt=[104, 105])
    prompts = [request.prompt for request in backend.requests]
    assert [type(prompt) for prompt in prompts] == [TextPrompt, ChatPrompt, TokenPrompt]
    assert all(request.warm and request.cache and not request.stream for request in backend.requests)


async def test_warm_tells_its_progress_and_can_be_cancelled(backend: FakeBackend, path: Path) -> None:
    generation = FakeGeneration()
    backend.script = lambda request: generation
    async with serving(backend, path) as running, running.peer() as peer:
        await peer.send(peer.request("cache.warm", model="tiny", prompt="x", workDoneToken="w"))
        await until(lambda: backend.requests)
        generation.push(Progress("prefill", 512, 1024))
        note = await peer.read()
        assert note["params"]["token"] == "w"
        assert note["params"]["value"]["done"] == 512
        await peer.send({"jsonrpc": "2.0", "method": "$/cancelRequest", "params": {"id": 1}})
        error = (await peer.answer())["error"]
    assert error["code"] == -32800
    assert error["data"]["partial"] == {"prompt_tokens": 3, "cached_tokens": 0}
    assert generation.is_cancelled


async def test_warm_says_where_it_is_of_no_use(backend: FakeBackend, path: Path) -> None:
    backend.script = lambda request: refusing(Unsupported("cache.warm", "tiny keeps no prompts"))
    async with serving(backend, path) as running, running.peer() as peer:
        assert (await peer.error("cache.warm", model="tiny", prompt="x"))["data"]["kind"] == "unsupported"


async def test_clear_takes_a_model_and_a_tier(backend: FakeBackend, path: Path) -> None:
    async with serving(backend, path) as running, running.peer() as peer:
        assert await peer.result("cache.clear") == {"freed_bytes": 4096}
        assert await peer.result("cache.clear", model="tiny", tier="ssd") == {"freed_bytes": 0}
        error = await peer.error("cache.clear", tier="warm")
        assert (error["code"], error["data"]["field"]) == (-32602, "tier")
    assert backend.clears == [(None, "all"), ("tiny", "ssd")]
