"""`omlxctl rpc`: any method, as it is written."""

import json

import pytest

from tests.cli.running import Home
from tests.cli.serving import Daemon

CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "a b"}], "stream": True})


def test_the_result_is_printed_indented_and_with_json_on_one_line(home: Home, daemon: Daemon) -> None:
    shown = home.run("rpc", "tokenize", '{"model": "tiny", "text": "ä"}')
    assert shown.text == '{\n  "tokens": [\n    195,\n    164\n  ],\n  "count": 2\n}\n'
    assert home.run("rpc", "tokenize", "-", "--json", stdin=b'{"model": "tiny", "text": "x"}').document == {
        "tokens": [120],
        "count": 1,
    }


def test_progress_goes_to_standard_error_one_line_each(home: Home, daemon: Daemon) -> None:
    outcome = home.run("rpc", "generate.chat", CHAT)
    assert json.loads(outcome.out)["text"] == "a b"
    assert "".join(json.loads(line)["text"] for line in outcome.errors) == "a b"
    assert home.run("rpc", "generate.chat", CHAT, "--quiet").err == b""


def test_progress_of_a_token_of_ones_own_is_shown_too(home: Home, daemon: Daemon) -> None:
    outcome = home.run("rpc", "models.load", '{"model": "tiny", "workDoneToken": "w"}')
    assert [json.loads(line)["phase"] for line in outcome.errors] == ["load"] * len(outcome.errors)
    assert outcome.errors


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["no.such"], -32601), (["tokenize"], -32602), (["ping", "[1]"], -32602), (["tokenize", '{"model": 5}'], -32602)],
)
def test_a_refusal_is_code_1_with_the_daemons_own_code(
    home: Home, daemon: Daemon, arguments: list[str], code: int
) -> None:
    outcome = home.run("rpc", *arguments, "--json")
    assert outcome.code == 1
    assert outcome.document["error"]["code"] == code
    assert len(outcome.errors) == 1
