"""What an answer is held to, from the command line to the request."""

from pathlib import Path
from typing import Any

import pytest

from omlxd.engine.api import Thinking
from tests.cli.running import Home
from tests.cli.serving import Daemon
from tests.fakes import answering


@pytest.mark.parametrize(
    ("flags", "format"),
    [
        (["--json-object"], {"type": "json_object"}),
        (["--json-schema", '{"type": "object"}'], {"type": "json_schema", "schema": {"type": "object"}}),
        (["--regex", "[0-9]+"], {"type": "regex", "pattern": "[0-9]+"}),
    ],
)
def test_the_form_of_an_answer_is_sent(home: Home, daemon: Daemon, flags: list[str], format: dict[str, Any]) -> None:
    assert home.run("run", "tiny", "hi", *flags).code == 0
    [request] = daemon.backend.requests
    assert request.response_format == format


def test_a_schema_and_a_grammar_may_be_files(home: Home, daemon: Daemon, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "string"}')
    grammar.write_text('start: "a"')
    assert home.run("run", "tiny", "hi", "--json-schema", str(schema)).code == 0
    assert home.run("complete", "tiny", "hi", "--grammar", str(grammar)).code == 0
    assert [request.response_format for request in daemon.backend.requests] == [
        {"type": "json_schema", "schema": {"type": "string"}},
        {"type": "grammar", "lark": 'start: "a"'},
    ]


@pytest.mark.parametrize(
    ("flags", "thinking"),
    [
        ([], None),
        (["--think"], Thinking()),
        (["--no-think"], Thinking(enabled=False)),
        (["--think-budget", "9"], Thinking(budget_tokens=9)),
    ],
)
def test_whether_and_how_long_to_reason_is_sent(
    home: Home, daemon: Daemon, flags: list[str], thinking: Thinking | None
) -> None:
    assert home.run("run", "tiny", "hi", *flags).code == 0
    [request] = daemon.backend.requests
    assert request.thinking == thinking


@pytest.mark.parametrize(
    "flags",
    [
        ["--think", "--no-think"],
        ["--json-object", "--regex", "a"],
        ["--json-schema", "{oops"],
        ["--json-schema", "/no/such/file"],
        ["--grammar", "/no/such/file"],
    ],
)
def test_flags_that_cannot_be_meant_are_usage_errors(home: Home, daemon: Daemon, flags: list[str]) -> None:
    outcome = home.run("run", "tiny", "hi", *flags)
    assert outcome.code == 2
    assert len(outcome.err.decode().strip().splitlines()) == 1


def test_chat_gives_the_reasoning_back_with_the_answer(home: Home, daemon: Daemon) -> None:
    daemon.backend.script = lambda request: answering("blue", reasoning="hm")
    assert home.run("chat", "tiny", stdin=b"one\ntwo\n").code == 0
    assert daemon.backend.requests[1].prompt.messages[1] == {  # type: ignore[union-attr]
        "role": "assistant",
        "content": "blue",
        "reasoning": "hm",
    }
