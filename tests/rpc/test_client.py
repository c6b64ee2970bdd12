"""The synchronous client, against a peer played by the test: one end of a socket pair, or a thread where both talk."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlxd.rpc.client import Client, DaemonUnreachable, RpcError


class Peer:
    """The daemon's end of a connection, driven line by line."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lines = connected.makefile("rb")

    def read(self) -> dict:
        return json.loads(self._lines.readline())

    def send(self, *messages: object) -> None:
        self._socket.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def at_end(self) -> bool:
        return self._lines.read() == b""

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


class Pair:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.notifications: list[tuple[str, object]] = []
        self.client = Client(ours, "/a/path", on_notification=lambda *seen: self.notifications.append(seen))
        self.peer = Peer(theirs)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.client.close()
    pair.peer.close()


def result(request_id: int, value: object) -> dict:
    return {"jsonrpc": "2.0", "id": request_id, "result": value}


def progress(token: int | str, value: object) -> dict:
    return {"jsonrpc": "2.0", "method": "$/progress", "params": {"token": token, "value": value}}


def test_a_call_sends_one_json_rpc_line_and_returns_the_result(pair: Pair) -> None:
    call = pair.client.start("tokenize", {"model": "m", "text": "zwei\nZeilen"})
    assert pair.peer.read() == {
        "jsonrpc": "2.0",
        "id": call.id,
        "method": "tokenize",
        "params": {"model": "m", "text": "zwei\nZeilen"},
    }
    pair.peer.send(result(call.id, {"count": 3}))
    assert call.result() == {"count": 3}


def test_a_call_without_parameters_has_no_params_member(pair: Pair) -> None:
    pair.client.start("ping")
    assert "params" not in pair.peer.read()


def test_an_error_answer_is_raised_with_its_code_message_and_data(pair: Pair) -> None:
    call = pair.client.start("models.load", {"model": "x"})
    error = {"code": -32010, "message": "no model 'x'", "data": {"kind": "model_not_found", "did_you_mean": ["y"]}}
    pair.peer.send({"jsonrpc": "2.0", "id": call.id, "error": error})
    with pytest.raises(RpcError) as caught:
        call.result()
    assert (caught.value.code, caught.value.message, caught.value.data) == (-32010, "no model 'x'", error["data"])


def test_iterating_a_call_gives_its_progress_in_order_and_then_its_result(pair: Pair) -> None:
    call = pair.client.start("generate.chat", {"stream": True})
    values = [{"kind": "delta", "seq": n, "text": str(n)} for n in range(3)]
    pair.peer.send(*[progress(call.id, value) for value in values], result(call.id, {"text": "012"}))
    assert list(call) == values
    assert call.result() == {"text": "012"}


def test_progress_of_tokens_the_client_chose_belongs_to_their_call(pair: Pair) -> None:
    call = pair.client.start("models.pull", {"source": "demo", "workDoneToken": "w"})
    pair.peer.send(progress("w", {"kind": "progress", "done": 1}), result(call.id, None))
    assert list(call) == [{"kind": "progress", "done": 1}]


def test_answers_of_several_running_calls_may_come_in_any_order(pair: Pair) -> None:
    first, second = pair.client.start("a"), pair.client.start("b")
    pair.peer.send(progress(first.id, "of a"), result(second.id, "b"), progress(first.id, "of a too"))
    assert second.result() == "b"
    pair.peer.send(result(first.id, "a"))
    assert list(first) == ["of a", "of a too"]
    assert first.result() == "a"


def test_notifications_of_no_call_go_to_the_listener_while_a_call_waits(pair: Pair) -> None:
    call = pair.client.start("ping")
    event = {"jsonrpc": "2.0", "method": "event", "params": {"topic": "models"}}
    pair.peer.send(event, progress("a stranger's", 1), result(call.id, "pong"))
    assert call.result() == "pong"
    assert pair.notifications == [("event", {"topic": "models"}), ("$/progress", {"token": "a stranger's", "value": 1})]


def test_cancelling_names_the_call_and_leaves_the_answer_to_come(pair: Pair) -> None:
    call = pair.client.start("generate.chat")
    pair.peer.read()
    call.cancel()
    assert pair.peer.read() == {"jsonrpc": "2.0", "method": "$/cancelRequest", "params": {"id": call.id}}
    pair.peer.send({"jsonrpc": "2.0", "id": call.id, "error": {"code": -32800, "message": "cancelled"}})
    with pytest.raises(RpcError, match="cancelled"):
        call.result()


def test_cancelling_after_the_end_sends_nothing(pair: Pair) -> None:
    call = pair.client.start("ping")
    pair.peer.read()
    pair.peer.send(result(call.id, "pong"))
    call.result()
    call.cancel()
    pair.client.close()
    assert pair.peer.at_end()


def test_a_line_that_arrives_byte_by_byte_with_blank_lines_around_is_one_message(pair: Pair) -> None:
    call = pair.client.start("ping")
    for byte in b"\n\r\n" + json.dumps(result(call.id, "p\u00f6ng")).encode() + b"\r\n":
        pair.peer.send_bytes(bytes([byte]))
    assert call.result() == "p\u00f6ng"


def test_an_error_without_an_id_reaches_every_call_that_waits(pair: Pair) -> None:
    calls = [pair.client.start("a"), pair.client.start("b")]
    pair.peer.send({"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "frame too large"}})
    for call in calls:
        with pytest.raises(RpcError, match="frame too large"):
            call.result()


def test_a_daemon_that_goes_away_during_a_call_is_unreachable(pair: Pair) -> None:
    call = pair.client.start("ping")
    pair.peer.read()
    pair.peer.close()
    with pytest.raises(DaemonUnreachable, match="closed the connection"):
        call.result()


def test_a_silent_daemon_is_unreachable_when_the_time_is_over(pair: Pair) -> None:
    with pytest.raises(DaemonUnreachable, match="does not answer in time"):
        pair.client.call("ping", timeout_s=0.01)


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\n", b"[1]\n", b'"pong"\n', b"[" * 100_000 + b"\n"])
def test_something_that_does_not_speak_json_rpc_is_no_daemon(pair: Pair, reply: bytes) -> None:
    call = pair.client.start("ping")
    pair.peer.send_bytes(reply)
    with pytest.raises(DaemonUnreachable, match="does not speak JSON-RPC"):
        call.result()


def test_frames_of_many_megabytes_pass_both_ways_at_once(pair: Pair) -> None:
    # DM-09: a line reader's usual limit is 64 KiB; and a peer that writes before it reads must not stop us for ever.
    text = "x" * (8 << 20)

    def talk() -> None:
        pair.peer.send(progress(1, text))
        request = pair.peer.read()
        pair.peer.send(result(request["id"], request["params"]["text"]))

    peer = threading.Thread(target=talk)
    peer.start()
    call = pair.client.start("echo", {"text": text})
    assert list(call) == [text]
    assert call.result() == text
    peer.join()


def test_a_missing_socket_is_unreachable_at_once(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="there is no socket"):
        Client.connect(str(tmp_path / "none.sock"))


def test_a_socket_that_nobody_listens_on_is_unreachable(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        with pytest.raises(DaemonUnreachable, match="nobody listens"):
            Client.connect(path)


def test_a_path_too_long_for_a_socket_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnreachable, match="too long"):
        Client.connect(str(tmp_path / ("x" * 120)))


def test_a_refusal_that_ends_within_300_ms_is_not_noticed(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    refused = threading.Event()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)  # until it listens, connecting is refused

    def listen_late() -> None:
        refused.wait()
        listener.listen()

    late = threading.Thread(target=listen_late)
    late.start()
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(path)
    refused.set()
    with Client.connect(path):
        listener.accept()[0].close()
    late.join()
    listener.close()


def test_importing_the_client_loads_nothing_heavy() -> None:
    code = "import sys, omlxd.rpc.client; print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split())
    heavy = {"asyncio", "dataclasses", "typing", "msgspec", "anyio", "jsonrpcserver", "mlx", "logging", "subprocess"}
    assert not loaded & heavy
