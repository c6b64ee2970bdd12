"""A conversation's state under a name: saved, found again after a restart, carried out as a file and back in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache

from omlxd.rpc.failures import RpcError
from tests.e2e.living import Daemon
from tests.models import MODELS, write

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
TOKENS = len(PROMPT)  # one for each byte
BAD_NAMES = ["../x", "/tmp/x", "a/b", "", ".", "..", "a\0b", "a" * 300, "con\n", "a\\b"]


def complete(daemon: Daemon, prompt: str, **params: Any) -> Any:
    return daemon.call(
        "generate.complete",
        model="tiny",
        prompt=prompt,
        max_tokens=4,
        temperature=0,
        return_token_ids=True,
        **params,
    )


def refused(daemon: Daemon, method: str, **params: Any) -> str:
    with pytest.raises(RpcError) as raised:
        daemon.call(method, **params)
    return str(raised.value.data["kind"])


def test_a_session_outlives_the_daemon_and_goes_on_with_each_answer(daemon: Daemon) -> None:
    saved = daemon.call("sessions.save", model="tiny", name="novel", prompt=PROMPT)
    assert saved["tokens"] == TOKENS - 1
    assert saved["bytes"] > 0
    assert refused(daemon, "sessions.save", model="tiny", name="novel", prompt=PROMPT) == "session_exists"
    cold = complete(daemon, PROMPT + "Winston", cache=False)
    daemon.signal()
    daemon.start()
    (listed,) = daemon.call("sessions.list")
    assert (listed["name"], listed["model"], listed["tokens"]) == ("novel", "tiny", TOKENS - 1)
    warm = complete(daemon, PROMPT + "Winston", session="novel")
    assert warm["usage"]["cached_tokens"] == TOKENS - 1
    assert warm["token_ids"] == cold["token_ids"]
    (listed,) = daemon.call("sessions.list", model="tiny")
    assert listed["tokens"] >= TOKENS + len("Winston")
    daemon.call("cache.clear")
    assert complete(daemon, PROMPT + "Winston")["usage"]["cached_tokens"] == TOKENS + len("Winston") - 1
    assert daemon.call("sessions.delete", model="tiny", name="novel")["name"] == "novel"
    assert daemon.call("sessions.list") == []
    assert refused(daemon, "sessions.delete", model="tiny", name="novel") == "session_not_found"
    with pytest.raises(RpcError) as raised:
        complete(daemon, PROMPT, session="novel")
    assert raised.value.data["kind"] == "session_not_found"


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_could_be_a_path_is_refused(daemon: Daemon, name: str) -> None:
    for method, more in (
        ("sessions.save", {"prompt": "x"}),
        ("sessions.delete", {}),
        ("sessions.export", {"path": "/tmp/never.safetensors"}),
    ):
        assert refused(daemon, method, model="tiny", name=name, **more) == "invalid_params"
    assert not Path("/tmp/never.safetensors").exists()
    assert daemon.call("sessions.save", model="tiny", name="plain name", prompt="xyz")["tokens"] == 2


def test_what_was_exported_is_what_mlx_lm_reads_and_comes_back_equal_after_a_restart_too(daemon: Daemon) -> None:
    """Every layout, in one daemon."""
    ask = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    cold, saved = {}, {}
    for layout in MODELS:
        write(layout, daemon.models / layout, eos=[])
        path = daemon.home.path / f"{layout}.safetensors"
        cold[layout] = daemon.call("generate.complete", model=layout, prompt=PROMPT + "x", cache=False, **ask)
        saved[layout] = daemon.call("sessions.save", model=layout, name="novel", prompt=PROMPT)
        daemon.call("sessions.export", model=layout, name="novel", path=str(path))
        assert path.stat().st_mode & 0o777 == 0o600
        assert refused(daemon, "sessions.export", model=layout, name="novel", path=str(path)) == "storage_failed"
        caches, metadata = load_prompt_cache(str(path), return_metadata=True)
        assert len(caches) > 0
        assert len(bytes.fromhex(metadata["tokens"])) == 4 * saved[layout]["tokens"]
        daemon.call("sessions.delete", model=layout, name="novel")
    daemon.call("cache.clear")
    for layout in MODELS:
        path = daemon.home.path / f"{layout}.safetensors"
        again = daemon.call("sessions.import", model=layout, name="novel", path=str(path))
        assert again["tokens"] == saved[layout]["tokens"]
    daemon.signal()
    daemon.start()
    for layout in MODELS:
        warm = daemon.call("generate.complete", model=layout, prompt=PROMPT + "x", session="novel", **ask)
        assert warm["usage"]["cached_tokens"] == saved[layout]["tokens"], layout
        assert warm["token_ids"] == cold[layout]["token_ids"], layout


def test_an_import_answers_only_who_names_it(daemon: Daemon) -> None:
    """What a file says of its later tokens nobody has computed here: other prompts are not answered from that."""
    good, bad = (daemon.home.path / f"{name}.safetensors" for name in ("good", "bad"))
    daemon.call("sessions.save", model="tiny", name="novel", prompt=PROMPT)
    daemon.call("sessions.export", model="tiny", name="novel", path=str(good))
    arrays, metadata = mx.load(str(good), return_metadata=True)
    assert isinstance(arrays, dict)
    late = mx.arange(arrays["0.0"].shape[2])[:, None] >= 100
    bad.write_bytes(saved_as({**arrays, "0.0": mx.where(late, arrays["0.0"] + 9, arrays["0.0"])}, metadata))
    daemon.call("sessions.delete", model="tiny", name="novel")
    daemon.call("cache.clear")
    daemon.call("sessions.import", model="tiny", name="theirs", path=str(bad))
    cold = complete(daemon, PROMPT, cache=False)
    ours = complete(daemon, PROMPT)
    assert ours["token_ids"] == cold["token_ids"]
    assert ours["usage"]["cached_tokens"] <= 17  # those that were computed here, to compare
    for _ in range(2):
        theirs = complete(daemon, PROMPT + "x", session="theirs")
        assert theirs["usage"]["cached_tokens"] >= TOKENS - 1
        assert complete(daemon, PROMPT)["token_ids"] == cold["token_ids"]
        daemon.signal()
        daemon.start()
    assert complete(daemon, PROMPT + "x")["token_ids"] == complete(daemon, PROMPT + "x", cache=False)["token_ids"]


def test_an_untrusted_file_is_refused_and_spoils_nothing(daemon: Daemon) -> None:
    good = daemon.home.path / "good.safetensors"
    daemon.call("sessions.save", model="tiny", name="novel", prompt=PROMPT)
    daemon.call("sessions.export", model="tiny", name="novel", path=str(good))
    arrays, metadata = mx.load(str(good), return_metadata=True)
    assert isinstance(arrays, dict)
    first = "0.0"
    cases = {
        "cut": good.read_bytes()[:-100],
        "empty": b"",
        "huge header": (1 << 60).to_bytes(8, "little") + b"{}",
        "no json": (8).to_bytes(8, "little") + b"[[[[[[[[",
        "class": saved_as(arrays, {**metadata, "1.0": "os.system"}),
        "type": saved_as({**arrays, first: arrays[first].astype(mx.float16)}, metadata),
        "shape": saved_as({**arrays, first: arrays[first][..., :3]}, metadata),
        "rows": saved_as({**arrays, first: arrays[first][:, :, :7]}, metadata),
        "numbers": saved_as({**arrays, first: arrays[first] + 3}, metadata),
        "nan": saved_as({**arrays, first: arrays[first] * float("nan")}, metadata),
        "offset": saved_as({**arrays, "0.2": mx.array(10**9)}, metadata),
        "less": saved_as({name: arrays[name] for name in arrays if name != first}, metadata),
        "tokens": saved_as(arrays, {**metadata, "0.tokens": "00" * 8}),
        "format": saved_as(arrays, {**metadata, "0.format": "something else"}),
    }
    for name, data in cases.items():
        path = daemon.home.path / "bad.safetensors"
        path.write_bytes(data)
        assert refused(daemon, "sessions.import", model="tiny", name="bad", path=str(path)) == "unsupported", name
    assert [session["name"] for session in daemon.call("sessions.list")] == ["novel"]
    cold = complete(daemon, PROMPT, cache=False)
    assert complete(daemon, PROMPT)["token_ids"] == cold["token_ids"]
    assert daemon.call("sessions.import", model="tiny", name="copy", path=str(good))["tokens"] == TOKENS - 1


def saved_as(arrays: dict[str, mx.array], metadata: dict[str, str]) -> bytes:
    path = Path("/dev/shm") / f"omlxd-{mx.random.randint(0, 1 << 30).item()}.safetensors"
    try:
        mx.save_safetensors(str(path), arrays, metadata)
        return path.read_bytes()
    finally:
        path.unlink(missing_ok=True)
