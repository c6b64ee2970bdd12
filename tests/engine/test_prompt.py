"""What a client sends becomes the model's token ids, or is refused as what its template will not have."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from omlxd.engine.api import ChatPrompt, InvalidParams, Json, LoadOptions
from omlxd.engine.catalog import Catalog
from omlxd.engine.loader import load
from omlxd.engine.model import LoadedModel
from omlxd.engine.prompt import RESERVED_KWARGS, token_ids
from tests import models

USER = {"role": "user", "content": "hi"}
Loader = Callable[[str], LoadedModel]


@pytest.fixture
def with_template(tmp_path: Path) -> Loader:
    def loaded(template: str) -> LoadedModel:
        folder = models.write("llama", tmp_path / "tiny", chat_template=template)
        return load(Catalog([]).resolve(str(folder)), LoadOptions(), progress=lambda _: None)

    return loaded


def rendered(model: LoadedModel, *messages: Mapping[str, Json], **kwargs: Json) -> str:
    ids = token_ids(ChatPrompt(messages or [USER], template_kwargs=kwargs), model.tokenizer, model.facts)
    return str(model.tokenizer.decode(ids))


FAILING = {
    "its own refusal": "{{ raise_exception('roles must alternate') }}",
    "a syntax error": "{% for m in messages %}{{ m",
    "a missing key": "{{ messages[5]['content'] }}",
    "a missing attribute": "{{ nothing.of.that }}",
    "an unknown filter": "{{ 'a' | no_filter }}",
    "arithmetic": "{{ 1 / 0 }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a way out of the sandbox": "{{ ''.__class__.__mro__ }}",
    "nothing at all": "{# empty #}",
}


@pytest.mark.parametrize("template", FAILING.values(), ids=FAILING)
def test_whatever_a_template_fails_with_the_messages_are_refused(with_template: Loader, template: str) -> None:
    with pytest.raises(InvalidParams) as refused:
        rendered(with_template(template))
    assert refused.value.fields["field"] == "messages"


def test_text_parts_are_joined_and_no_content_is_the_empty_text(with_template: Loader) -> None:
    model = with_template("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered(model, {"role": "user", "content": parts}, {"role": "assistant", "content": None}) == "[ab][]"


def test_a_client_sets_variables_of_the_template(with_template: Loader) -> None:
    assert rendered(with_template("{{ mood }} {{ documents[0]['text'] }}"), mood="odd", documents=[{"text": "x"}]) == (
        "odd x"
    )


@pytest.mark.parametrize("name", ["chat_template", "messages", "self", "tools", "tokenizer_kwargs"])
def test_a_client_does_not_set_what_renders_the_template(with_template: Loader, name: str) -> None:
    with pytest.raises(InvalidParams, match=f"{name} cannot be set") as refused:
        rendered(with_template("x"), **{name: "{{ 1 }}"})
    assert refused.value.fields["field"] == "chat_template_kwargs"


def test_every_parameter_of_the_rendering_call_but_documents_is_reserved() -> None:
    parameters = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert parameters - RESERVED_KWARGS == {"documents", "kwargs"}
