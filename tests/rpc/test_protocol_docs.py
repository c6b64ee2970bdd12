"""docs/protocol.md: its tables are those of the types."""

from __future__ import annotations

import json

import pytest

from omlxd.rpc.discover import document
from omlxd.rpc.docs import page
from omlxd.rpc.methods import described
from tests.snippets import DOCS

PAGE = (DOCS / "protocol.md").read_text()


def test_the_page_is_as_the_types_are() -> None:
    assert page(PAGE) == PAGE, "the wire's types have changed: run `python -m omlxd.rpc.docs` and read what it says"


def test_every_link_on_the_page_has_its_place() -> None:
    """Links are made for types and for the shared parameters, which stand under headings."""
    headings = {line.lstrip("# ").lower().replace(" ", "-") for line in PAGE.splitlines() if line.startswith("#")}
    links = [part.split(")")[0] for part in PAGE.split("](#")[1:]]
    assert links
    assert [link for link in links if link not in headings] == []


def test_every_method_error_and_type_has_its_place() -> None:
    content = json.loads(bytes(document("", described())))
    for method in content["methods"]:
        assert f"\n### {method['name']}\n" in PAGE
    for kind in content["components"]["errors"]:
        assert f"| `{kind}` |" in PAGE
    for name in content["components"]["schemas"]:
        assert f"\n### {name}\n" in PAGE


def test_a_page_without_its_mark_is_not_overwritten() -> None:
    with pytest.raises(ValueError, match="no mark"):
        page("# The protocol\n")
