"""The methods, one by one, as PROTOCOL.md's table has them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from omlxd.engine.api import ChatPrompt, LoadOptions, StorageFailed, TextPrompt
from omlxd.rpc.errors import CODES
from omlxd.rpc.methods import METHODS
from tests.fakes import FakeBackend, entry, serving_in_thread
from tests.rpc.peers import serving

pytestmark = pytest.mark.anyio
ENTRY = {
    "name": "tiny",
    "path": "/models/tiny",
    "kind": "llama",
    "state": "ABSENT",
    "size_bytes": 1000,
    "pinned": False,
    "ttl_s": None,
    "loaded_at": None,
    "last_used": None,
    "requests": 0,
}


async def asked(backend: FakeBackend, path: Path, method: str, /, **params: Any) -> Any:
    async with serving(backend, path) as running, running.peer() as peer:
        answer = await peer.ask(method, **params)
        return answer.get("error") or answer["result"]


async def test_daemon_info_says_who_answers(backend: FakeBackend, path: Path) -> None:
    info = await asked(backend, path, "daemon.info")
    assert set(info) == {
        "version", "pid", "uptime_s", "home", "socket", "device", "platform", "mlx", "mlx_lm", "mlx_vlm", "protocol",
    }  # fmt: skip
    assert (info["pid"], info["protocol"]) == (42, 1)


async def test_daemon_status_is_everything_in_one_reading(backend: FakeBackend, path: Path) -> None:
    status = await asked(backend, path, "daemon.status")
    assert set(status) == {"info", "models", "requests", "counts", "memory", "cache"}
    assert status["models"] == [ENTRY]


@pytest.mark.parametrize(("params", "grace_s"), [({}, None), ({"grace_s": 0}, 0), ({"grace_s": 2.5}, 2.5)])
async def test_daemon_shutdown_starts_the_drain(
    backend: FakeBackend, path: Path, params: dict[str, Any], grace_s: float | None
) -> None:
    assert await asked(backend, path, "daemon.shutdown", **params) is True
    assert backend.shutdowns == [grace_s]


async def test_daemon_reload_says_which_keys_hold_and_which_need_a_restart(backend: FakeBackend, path: Path) -> None:
    reloaded = await asked(backend, path, "daemon.reload")
    assert reloaded == {"applied": ["log.level"], "needs_restart": ["engine.max_batch"]}


async def test_settings_that_cannot_be_used_refuse_the_reload(backend: FakeBackend, path: Path) -> None:
    backend.failure = StorageFailed("/h/config.toml", "unknown key")
    error = await asked(backend, path, "daemon.reload")
    assert (error["code"], error["data"]["path"]) == (-32022, "/h/config.toml")


async def test_models_list_leaves_out_what_there_is_not_to_say(backend: FakeBackend, path: Path) -> None:
    backend.models["bad"] = replace(entry("bad"), state="FAILED", error="no weights")
    plain, bad = await asked(backend, path, "models.list")
    assert plain == ENTRY
    assert bad == {**ENTRY, "name": "bad", "path": "/models/bad", "state": "FAILED", "error": "no weights"}


async def test_models_load_gives_the_entry_ready(backend: FakeBackend, path: Path) -> None:
    loaded = await asked(
        backend, path, "models.load", model="tiny", pin=True, ttl_s=60, kv_bits=8, draft="d", adapter="a"
    )
    assert loaded == {**ENTRY, "state": "READY", "pinned": True}
    assert backend.loads == [("tiny", LoadOptions(pin=True, ttl_s=60, draft="d", kv_bits=8, adapter="a"))]


async def test_models_unload_gives_the_entry_and_what_was_freed(backend: FakeBackend, path: Path) -> None:
    assert await asked(backend, path, "models.unload", model="tiny", now=True) == {**ENTRY, "freed_bytes": 1000}


async def test_models_pull_gives_the_new_entry(backend: FakeBackend, path: Path) -> None:
    pulled = await asked(backend, path, "models.pull", source="demo", name="mine")
    assert pulled["name"] == "mine"
    assert backend.pulls == [("demo", "mine")]


async def test_tokenize_and_detokenize_are_inverse(backend: FakeBackend, path: Path) -> None:
    tokens = await asked(backend, path, "tokenize", model="tiny", text="é")
    assert tokens == {"tokens": [195, 169], "count": 2}
    path = path.with_name("t")
    assert await asked(backend, path, "detokenize", model="tiny", tokens=tokens["tokens"]) == {"text": "é"}


async def test_generate_chat_and_complete_reach_the_backend_as_what_they_are(backend: FakeBackend, path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with serving(backend, path) as running, running.peer() as peer:
        chat = await peer.result("generate.chat", model="tiny", messages=messages)
        complete = await peer.result("generate.complete", model="tiny", prompt="hi")
    assert chat == complete
    assert set(chat) == {"model", "text", "finish_reason", "usage", "timings", "seed"}
    assert set(chat["usage"]) == {"prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"}
    timed = {"queue_ms", "fetch_ms", "prefill_ms", "ttft_ms", "decode_ms", "tokens_per_s", "mask_ms"}
    assert set(chat["timings"]) == timed
    assert [request.prompt for request in backend.requests] == [ChatPrompt(messages), TextPrompt("hi")]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("generate.complete", {"prompt": "a"}),
        ("models.load", {}),
        ("models.unload", {}),
        ("tokenize", {"text": "a"}),
        ("detokenize", {"tokens": []}),
    ],
)
async def test_an_unknown_model_is_told_with_the_nearest_name(
    backend: FakeBackend, path: Path, method: str, params: dict[str, Any]
) -> None:
    error = await asked(backend, path, method, model="tinny", **params)
    assert error["code"] == -32010
    assert error["data"] == {"kind": "model_not_found", "model": "tinny", "did_you_mean": ["tiny"]}


async def test_an_unknown_method_is_told_with_the_nearest_name(backend: FakeBackend, path: Path) -> None:
    error = await asked(backend, path, "models.lost")
    assert error["code"] == -32601
    assert "models.list" in error["message"]


@pytest.mark.parametrize("method", ["daemon.info", "rpc.discover", "initialize", "daemon.status"])
async def test_a_bug_is_an_internal_error_whose_traceback_stays_in_the_log(
    backend: FakeBackend, path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    backend.failure = RuntimeError("/secret/path")
    error = await asked(backend, path, method)
    assert error["code"] == -32603
    assert error["data"] == {"kind": "internal", "id": error["data"]["id"]}
    assert "secret" not in json.dumps(error)
    (record,) = caplog.records
    assert record.name == "omlxd.rpc"
    assert error["data"]["id"] in record.getMessage()
    assert record.exc_info


async def test_a_bug_beside_progress_is_an_internal_error_too(backend: FakeBackend, path: Path) -> None:
    backend.models["tiny"] = None  # type: ignore[assignment]
    async with serving(backend, path) as running, running.peer() as peer:
        assert (await peer.error("models.load", model="tiny", workDoneToken="w"))["code"] == -32603
        assert await peer.result("ping") == "pong"


async def test_discover_describes_every_method_from_its_types(backend: FakeBackend, path: Path) -> None:
    document = await asked(backend, path, "rpc.discover")
    assert document["openrpc"].startswith("1.")
    methods = {method["name"]: method for method in document["methods"]}
    assert set(methods) == set(METHODS)
    chat = {param["name"]: param for param in methods["generate.chat"]["params"]}
    assert [name for name, param in chat.items() if param["required"]] == ["model", "messages"]
    (seed,) = (kind for kind in chat["seed"]["schema"]["anyOf"] if kind["type"] == "integer")
    assert (seed["minimum"], seed["maximum"]) == (0, 2**63 - 1)
    assert methods["generate.chat"]["result"]["schema"] == {"$ref": "#/components/schemas/Generated"}
    assert {error["code"] for error in document["components"]["errors"].values()} == set(CODES.values())
    assert [note["name"] for note in document["x-notifications"]] == ["$/progress", "event"]


async def test_discover_refers_to_nothing_that_is_not_there(backend: FakeBackend, path: Path) -> None:
    document = await asked(backend, path, "rpc.discover")

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [reference for value in node.values() for reference in references(value)]
        return [reference for value in node for reference in references(value)] if isinstance(node, list) else []

    for reference in references(document):
        place: Any = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]
        assert place


async def test_the_fake_can_serve_from_a_thread(path: Path) -> None:
    with serving_in_thread(FakeBackend(), path):
        async with await anyio.connect_unix(path) as stream:
            await stream.send(b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n')
            assert json.loads(await stream.receive())["result"] == "pong"
