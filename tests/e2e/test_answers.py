"""Channels, forms and refusals over the socket of a real daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from omlxd.rpc.client import RpcError
from tests.e2e.living import Daemon, daemon_in_new_home
from tests.models import CHAT_TEMPLATE, write, write_scripted

THINKS = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}{# </think> #}")
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with daemon_in_new_home() as living:
        write("llama", living.models / "tiny")
        write_scripted(living.models / "thinker", ["Hm", ".</th", "ink>", "Blue", " sky"], chat_template=THINKS)
        living.start()
        yield living


def test_reasoning_and_content_come_apart_and_add_up(daemon: Daemon) -> None:
    params = {"model": "thinker", "messages": HI, "stream": True, "temperature": 0}
    with daemon.client() as client:
        call = client.start("generate.chat", params)
        deltas = [value for value in call if value["kind"] == "delta"]
        result = call.result()
    assert (result["reasoning"], result["text"], result["finish_reason"]) == ("Hm.", "Blue sky", "stop")
    for channel, whole in (("reasoning", "Hm."), ("content", "Blue sky")):
        assert "".join(delta["text"] for delta in deltas if delta["channel"] == channel) == whole
    assert result["usage"]["reasoning_tokens"] == 3


def test_an_answer_is_held_to_its_form(daemon: Daemon) -> None:
    form = {"type": "regex", "pattern": "[a-c]{3}-[0-9]{2}"}
    plain = {"model": "tiny", "messages": HI, "max_tokens": 200, "temperature": 0}
    result = daemon.call("generate.chat", **plain, response_format=form)
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", result["text"])
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    result = daemon.call("generate.chat", **plain, response_format={"type": "json_schema", "schema": schema})
    assert result["finish_reason"] == "length" or isinstance(json.loads(result["text"])["ok"], bool)


@pytest.mark.parametrize(
    ("changes", "code", "kind"),
    [
        ({"response_format": {"type": "regex", "pattern": "(a"}}, -32015, "invalid_grammar"),
        ({"thinking": {"enabled": True}}, -32021, "unsupported"),
        ({"tools": [{"type": "function", "function": {"name": "w"}}]}, -32021, "unsupported"),
        ({"tool_choice": "required"}, -32602, "invalid_params"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_its_code(
    daemon: Daemon, changes: dict[str, Any], code: int, kind: str
) -> None:
    with pytest.raises(RpcError) as refused:
        daemon.call("generate.chat", model="tiny", messages=HI, **changes)
    assert (refused.value.code, refused.value.data["kind"]) == (code, kind)
