"""What people ask and are answered stays out of the log, whatever goes wrong, unless they allow it there."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from omlxd.rpc.client import RpcError
from tests.e2e.living import Daemon, daemon_in_new_home, until
from tests.models import write, write_scripted

ASKED, ANSWERED = "PLUGH", "Hello there"
CHAT = {"model": "parrot", "messages": [{"role": "user", "content": f"say {ASKED}"}]}


@pytest.fixture
def home() -> Iterator[Daemon]:
    with daemon_in_new_home() as living:
        write("llama", living.models / "tiny", eos=[])
        write("llama", living.models / "torn", chat_template="{{ messages[0].content.nothing.more }}")
        write_scripted(living.models / "parrot", ["Hello", " there", "."])
        yield living


def ask_everything(daemon: Daemon) -> None:
    """Every way in which words reach the daemon: answered, refused, failing, cancelled, not even understood."""
    messages = CHAT["messages"]
    for method, params in [
        ("generate.chat", {**CHAT, "stream": True}),
        ("generate.chat", {**CHAT, "stop": [ASKED], "tools": [{"type": ASKED}]}),
        ("generate.chat", {**CHAT, "model": "torn"}),
        ("generate.chat", {**CHAT, "messages": [{"role": ASKED, "content": ASKED}]}),
        ("generate.complete", {"model": "parrot", "prompt": ASKED, "temperature": ASKED}),
        ("generate.complete", {"model": "parrot", "prompt": ASKED * 400}),
        ("generate.complete", {"model": "parrot", "prompt": ASKED, "suffix": ASKED}),
        (
            "generate.complete",
            {"model": "parrot", "prompt": ASKED, "response_format": {"type": "regex", "pattern": "("}},
        ),
        ("tokenize", {"model": "tiny", "text": ASKED}),
        ("tokenize", {"model": "torn", "messages": messages}),
        (ASKED, {ASKED: ASKED}),
    ]:
        with contextlib.suppress(RpcError):
            daemon.call(method, **params)
    with daemon.client() as client:
        long: dict[str, Any] = {"model": "tiny", "prompt": ASKED, "max_tokens": 400, "ignore_eos": True, "stream": True}
        call = client.start("generate.complete", long)
        next(iter(call))
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(daemon.home.socket)
        raw.sendall(b"{" + ASKED.encode() + b"}\n" + json.dumps([ASKED]).encode() + b"\nContent-Nothing: PLUGH\r\n\r\n")
        raw.shutdown(socket.SHUT_WR)
        while raw.recv(65536):
            pass
    until(lambda: daemon.live() == 0)


def written(daemon: Daemon) -> str:
    """Everything that the daemon has written down, and what it said on standard error."""
    logs = list((daemon.home.path / "logs").iterdir())
    return "".join(path.read_text() for path in [*logs, daemon.home.path / "stderr"])


def test_without_leave_no_word_of_a_prompt_or_an_answer_is_logged_even_at_the_level_debug(home: Daemon) -> None:
    home.start(OMLXD_LOG__LEVEL="debug")
    ask_everything(home)
    assert home.signal() == 0, written(home)
    assert "loaded parrot" in written(home)
    assert ASKED not in written(home)
    assert ANSWERED not in written(home)


def test_with_leave_both_are_logged_from_the_moment_it_is_given(home: Daemon) -> None:
    home.start()
    home.call("generate.chat", **CHAT)
    assert ASKED not in written(home)
    (home.home.path / "config.toml").write_text("[log]\ncontent = true\n")
    assert home.call("daemon.reload") == {"applied": ["log.content"], "needs_restart": []}
    home.call("generate.chat", **CHAT)
    assert f"say {ASKED}" in home.log
    assert f"was answered: {ANSWERED}" in home.log
