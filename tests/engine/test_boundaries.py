"""Checkpoints are taken where the messages of a conversation end, whatever its template does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_lm.tokenizer_utils

from omlxd.engine.api import ChatPrompt, TextPrompt
from omlxd.engine.boundaries import LAST_MESSAGES, boundaries
from omlxd.engine.prompt import render
from tests.engine.running import loaded, tokenizer
from tests.models import write

FACTS = loaded("llama").facts


def conversation(turns: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"question {turn}"},
            {"role": "assistant", "content": f"answer {turn}"},
        ]
    return messages[:-1]


def found(messages: list[dict[str, str]], using: Any = None) -> tuple[list[int], list[int]]:
    prompt, using = ChatPrompt(messages), using or tokenizer()
    ids = render(prompt, using, FACTS)
    return ids, boundaries(prompt, ids, using, FACTS)


def with_template(tmp_path: Path, template: str) -> Any:
    return mlx_lm.tokenizer_utils.load(write("llama", tmp_path / "m", chat_template=template))


def test_every_message_but_the_last_ends_at_a_boundary() -> None:
    ids, places = found(conversation(2))
    texts = [tokenizer().decode(ids[:place]) for place in places]
    assert [text.count("<|im_end|>") for text in texts] == [1, 2, 3]
    assert all(text.endswith("<|im_end|>\n") for text in texts)


def test_of_a_long_conversation_the_first_message_and_the_last_ones_count() -> None:
    ids, places = found(conversation(30))
    assert len(places) == LAST_MESSAGES + 1
    assert tokenizer().decode(ids[: places[0]]).endswith("Be brief.<|im_end|>\n")


def test_a_single_message_and_a_raw_prompt_have_none() -> None:
    assert found([{"role": "user", "content": "hi"}])[1] == []
    assert boundaries(TextPrompt("hi"), [1, 2], tokenizer(), FACTS) == []


def test_a_template_that_refuses_fewer_messages_only_has_fewer_boundaries(tmp_path: Path) -> None:
    template = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('no user') }}{% endif %}"
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    )
    ids, places = found(conversation(1), with_template(tmp_path, template))
    assert (len(ids) > 0, places) == (True, [])


def test_a_template_that_renders_history_otherwise_agrees_up_to_where_it_does(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m['content'] }}{% if loop.last %}!{% endif %}>{% endfor %}"
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    ids, places = found(messages, with_template(tmp_path, template))
    assert bytes(ids[: places[0]]) == b"<ab"
