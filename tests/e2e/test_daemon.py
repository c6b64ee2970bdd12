"""The daemon as a process: how it starts, serves several clients, and ends, whatever they do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import threading
import time
from typing import Any

import pytest

from omlxd.rpc.client import Client, DaemonUnreachable, RpcError
from tests.e2e.living import Daemon, daemon_in_new_home, rss_bytes, until
from tests.models import write

LONG = {"model": "tiny", "prompt": "x", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


def started(client: Client, **changes: Any) -> Any:
    """A long streaming generation that has sent its first delta."""
    call = client.start("generate.complete", {**LONG, **changes})
    next(value for value in call if value["kind"] == "delta")
    return call


def refusal(daemon: Daemon, method: str, **params: Any) -> RpcError:
    with pytest.raises(RpcError) as caught:
        daemon.call(method, **params)
    return caught.value


# -- words ------------------------------------------------------------------------------------------------------------


def test_an_answer_is_streamed_over_the_socket_in_whole_characters(daemon: Daemon) -> None:
    params = {"model": "parrot", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with daemon.client() as client:
        call = client.start("generate.chat", params)
        deltas = [value for value in call if value["kind"] == "delta"]
        result = call.result()
    assert result["text"] == "Hello there, \U0001f44b friend."
    assert "".join(delta["text"] for delta in deltas) == result["text"]
    assert [delta["seq"] for delta in deltas] == list(range(len(deltas)))
    assert result["finish_reason"] == "stop"
    assert result["usage"]["completion_tokens"] == 6


def test_any_line_of_json_is_a_client(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(daemon.home.socket)
        request = {"jsonrpc": "2.0", "id": "a", "method": "generate.complete"}
        raw.sendall(json.dumps({**request, "params": {"model": "parrot", "prompt": "\n"}}).encode())
        raw.shutdown(socket.SHUT_WR)  # no newline, as printf | nc would send it
        with raw.makefile() as answers:
            (answer,) = [json.loads(line) for line in answers]
    assert answer["id"] == "a"
    assert answer["result"]["text"].startswith("Hello")


def test_requests_of_all_clients_share_the_batch(daemon: Daemon) -> None:
    with daemon.client() as client:
        calls = [started(client) for _ in range(4)]
        assert daemon.call("models.list")[1]["requests"] == 4
        assert {call.result()["finish_reason"] for call in calls} == {"length"}


def test_two_models_serve_at_once(daemon: Daemon) -> None:
    with daemon.client() as client:
        long = started(client)
        assert daemon.call("generate.complete", model="parrot", prompt="\n")["text"].startswith("Hello")
        states = {entry["name"]: entry["state"] for entry in daemon.call("models.list")}
        assert states == {"tiny": "BUSY", "parrot": "READY"}
        long.cancel()


def test_tokenize_and_detokenize_are_inverse(daemon: Daemon) -> None:
    tokens = daemon.call("tokenize", model="parrot", text="na\u00efve \U0001f44b")
    assert tokens["count"] == len(tokens["tokens"])
    assert daemon.call("detokenize", model="parrot", tokens=tokens["tokens"]) == {"text": "na\u00efve \U0001f44b"}


def test_an_unloaded_model_gives_its_memory_back_and_loads_again(daemon: Daemon) -> None:
    daemon.call("models.load", model="tiny")
    gone = daemon.call("models.unload", model="tiny")
    assert gone["freed_bytes"] >= os.path.getsize(daemon.models / "tiny" / "model.safetensors") * 0.9
    assert (
        daemon.call("generate.complete", model="tiny", prompt="x", max_tokens=1, ignore_eos=True)["finish_reason"]
        == "length"
    )


def test_unloading_now_ends_the_models_requests_with_cancelled(daemon: Daemon) -> None:
    with daemon.client() as client:
        call = started(client)
        daemon.call("models.unload", model="tiny", now=True)
        with pytest.raises(RpcError) as caught:
            call.result()
    assert caught.value.code == -32800
    assert caught.value.data["reason"] == "model unloaded"
    assert caught.value.data["partial"]["text"]


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(daemon: Daemon) -> None:
    error = refusal(daemon, "generate.complete", model="parot", prompt="x")
    assert (error.code, error.data["kind"], error.data["did_you_mean"]) == (-32010, "model_not_found", ["parrot"])


def test_a_prompt_over_the_context_is_refused_with_both_numbers(daemon: Daemon) -> None:
    error = refusal(daemon, "generate.complete", model="tiny", prompt=[1] * 512)
    assert (error.code, error.data["tokens"], error.data["limit"]) == (-32014, 512, 512)
    assert daemon.call("generate.complete", model="tiny", prompt=[1] * 511, max_tokens=9, ignore_eos=True)["usage"] == {
        "prompt_tokens": 511,
        "cached_tokens": 0,
        "completion_tokens": 1,
        "reasoning_tokens": 0,
    }


@pytest.mark.parametrize(
    ("method", "params", "field"),
    [
        ("generate.chat", {"messages": []}, "messages"),
        ("generate.complete", {"prompt": []}, "prompt"),
        ("generate.complete", {"prompt": ""}, "prompt"),
        ("generate.complete", {"prompt": [9999]}, "prompt"),
        ("generate.complete", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("generate.complete", {"prompt": "x", "logit_bias": {"9999": 1}}, "logit_bias"),
        ("generate.chat", {"messages": [{"role": "user", "content": "x"}], "tool": 1}, "tool"),
    ],
)
def test_what_cannot_be_a_request_is_refused_by_its_field(
    daemon: Daemon, method: str, params: dict[str, Any], field: str
) -> None:
    error = refusal(daemon, method, model="tiny", **params)
    assert (error.code, error.data["field"]) == (-32602, field)


def test_a_chat_without_a_template_is_unsupported_and_complete_works(daemon: Daemon) -> None:
    write("llama", daemon.models / "bare", chat_template=None)
    error = refusal(daemon, "generate.chat", model="bare", messages=[{"role": "user", "content": "x"}])
    assert (error.code, error.data["what"]) == (-32021, "chat")
    assert (
        daemon.call("generate.complete", model="bare", prompt="x", max_tokens=2, ignore_eos=True)["usage"][
            "completion_tokens"
        ]
        == 2
    )


def test_broken_models_are_listed_with_their_reason_and_harm_nobody(daemon: Daemon) -> None:
    for name in ("cut", "odd", "mute", "evil"):
        shutil.copytree(daemon.models / "tiny", daemon.models / name)
    weights = daemon.models / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    change_config(daemon, "odd", model_type="nosuch_arch")
    (daemon.models / "mute" / "tokenizer.json").unlink()
    change_config(daemon, "evil", model_file="evil.py")
    listed = {entry["name"]: entry for entry in daemon.call("models.list")}
    for name in ("cut", "odd", "mute", "evil"):
        assert listed[name]["state"] == "FAILED"
        assert listed[name]["error"]
        assert refusal(daemon, "models.load", model=name).code in (-32011, -32021)
    assert daemon.call("generate.complete", model="tiny", prompt="x", max_tokens=1, ignore_eos=True)["text"]


def change_config(daemon: Daemon, name: str, **changes: Any) -> None:
    path = daemon.models / name / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# -- clients that go, or do not read ----------------------------------------------------------------------------------


def test_a_client_that_dies_takes_its_requests_with_it(daemon: Daemon) -> None:
    for _ in range(3):
        client = daemon.client()
        started(client)
        client.close()
    until(lambda: daemon.live() == 0)


def test_a_client_that_never_reads_holds_nobody_up_and_little_memory(daemon: Daemon) -> None:
    assert daemon.process is not None
    daemon.call("generate.complete", model="tiny", prompt="x", max_tokens=1)
    before = rss_bytes(daemon.process.pid)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(daemon.home.socket)
        for id in range(20):
            deaf.sendall(
                json.dumps({"jsonrpc": "2.0", "id": id, "method": "generate.complete", "params": LONG}).encode()
            )
            deaf.sendall(b"\n")
        answer = daemon.call("generate.complete", model="tiny", prompt="y", max_tokens=50, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 50
        assert rss_bytes(daemon.process.pid) - before < 200 * 2**20
    until(lambda: daemon.live() == 0)


def test_a_cancelled_request_is_answered_once_with_what_it_has(daemon: Daemon) -> None:
    with daemon.client() as client:
        call = started(client, return_token_ids=True)
        call.cancel()
        call.cancel()
        with pytest.raises(RpcError) as caught:
            call.result()
        assert client.call("ping") == "pong"
    partial = caught.value.data["partial"]
    assert (caught.value.code, partial["finish_reason"]) == (-32800, "cancelled")
    assert len(partial["token_ids"]) == partial["usage"]["completion_tokens"] > 0


# -- the process ------------------------------------------------------------------------------------------------------


def test_a_stop_lets_running_requests_finish_and_leaves_no_socket(daemon: Daemon) -> None:
    with daemon.client() as client:
        call = started(client, max_tokens=100)
        waiter = threading.Thread(target=daemon.signal)
        waiter.start()
        assert call.result()["usage"]["completion_tokens"] == 100
        waiter.join()
    assert daemon.process is not None
    assert daemon.process.returncode == 0
    assert not os.path.exists(daemon.home.socket)


def test_past_its_grace_a_stop_ends_requests_with_shutting_down(daemon: Daemon) -> None:
    with daemon.client() as client:
        call = started(client)
        with daemon.client() as other:
            assert other.call("daemon.shutdown", {"grace_s": 0}) is True
        with pytest.raises(RpcError) as caught:
            call.result()
    assert (caught.value.code, caught.value.data["kind"]) == (-32018, "shutting_down")
    assert daemon.process is not None
    assert daemon.process.wait(20) == 0


def test_past_its_grace_a_stop_answers_what_waits_for_a_template_that_never_ends(daemon: Daemon) -> None:
    loop = "{% for i in range(99999) %}"
    write("llama", daemon.models / "endless", chat_template=loop * 3 + "{% endfor %}" * 3)
    with daemon.client() as client:
        call = client.start("tokenize", {"model": "endless", "messages": [{"role": "user", "content": "hi"}]})
        until(lambda: [model["requests"] for model in daemon.call("daemon.status")["models"]] == [1])
        daemon.call("daemon.shutdown", grace_s=0)
        with pytest.raises(RpcError) as caught:
            call.result()
        assert caught.value.data["kind"] == "shutting_down"
    assert daemon.process is not None
    assert daemon.process.wait(30) == 0


def test_after_kill_9_the_next_daemon_serves_at_the_same_socket(daemon: Daemon) -> None:
    with daemon.client() as client:
        call = started(client)
        assert daemon.signal(signal.SIGKILL) == -signal.SIGKILL
        with pytest.raises(DaemonUnreachable):
            call.result()
    assert os.path.exists(daemon.home.socket)
    daemon.start()
    assert daemon.call("generate.complete", model="tiny", prompt="x", max_tokens=1, ignore_eos=True)["text"]


def test_a_daemon_stopped_for_a_while_goes_on_as_if_nothing_had_been(daemon: Daemon) -> None:
    assert daemon.process is not None
    with daemon.client() as client:
        call = started(client)
        daemon.process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)  # the pause itself is what is tested
        daemon.process.send_signal(signal.SIGCONT)
        assert call.result(timeout_s=60)["usage"]["completion_tokens"] == 400


def test_what_the_daemon_makes_is_private(daemon: Daemon) -> None:
    daemon.call("generate.complete", model="tiny", prompt="a secret", max_tokens=3)
    for path, mode in ((daemon.home.path, 0o700), (daemon.home.path / "logs", 0o700), (daemon.home.socket, 0o600)):
        assert stat.S_IMODE(os.stat(path).st_mode) == mode
    assert "secret" not in daemon.log


def test_an_idle_daemon_has_not_imported_mlx() -> None:
    with daemon_in_new_home() as living:
        living.start()
        assert living.process is not None
        assert living.call("models.list") == []
        with open(f"/proc/{living.process.pid}/maps") as mapped:
            assert "libmlx" not in mapped.read()
