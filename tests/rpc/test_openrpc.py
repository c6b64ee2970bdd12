"""What the OpenRPC document allows, the server takes, and what it does not allow is refused by its field.

Parameters are drawn from the document's schemas and go through the real dispatch; jsonschema says of a changed one
whether it still is allowed. What JSON Schema cannot tell apart (1 and 1.0) is not drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import anyio
import jsonschema
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from omlxd.engine.api import (
    CacheExplanation,
    CacheLine,
    CacheTier,
    GenerateRequest,
    LoadOptions,
    ModelEntry,
    ProgressSink,
    Prompt,
    TextPrompt,
    Unloaded,
)
from omlxd.rpc.calls import Call
from omlxd.rpc.discover import document
from omlxd.rpc.dispatch import Dispatcher
from omlxd.rpc.envelope import Request
from omlxd.rpc.methods import METHODS, described
from tests.fakes import MODEL, FakeBackend, FakeGeneration, answering, entry

DOCUMENT: Final = json.loads(bytes(document("0", described())))
SPOKEN: Final = {method["name"]: method for method in DOCUMENT["methods"]}
DISPATCHER: Final = Dispatcher(METHODS)
INVALID_PARAMS, INTERNAL = -32602, -32603
FEW = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)

# What holds between parameters, for which OpenRPC has no words: the page has, in prose.
JUST_ONE: Final = {
    "cancel": ("id", "token"),
    "$/cancelRequest": ("id", "token"),
    "tokenize": ("text", "messages"),
    "cache.explain": ("messages", "prompt"),
    "cache.warm": ("messages", "prompt"),
    "sessions.save": ("messages", "prompt"),
}


class Willing(FakeBackend):
    """Does at once whatever it is asked, whichever model it is for."""

    def generate(self, request: GenerateRequest) -> FakeGeneration:
        return answering("x")

    async def load_model(self, model: str, options: LoadOptions, progress: ProgressSink) -> ModelEntry:
        return entry(model)

    async def unload_model(self, model: str, *, now: bool) -> Unloaded:
        return Unloaded(entry(model), 0)

    async def tokenize(self, model: str, prompt: Prompt) -> Sequence[int]:
        return [1]

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        return "x"

    async def cache_stats(self, model: str | None) -> Sequence[CacheLine]:
        return []

    async def explain_cache(self, model: str, prompt: Prompt) -> CacheExplanation:
        return await super().explain_cache(MODEL, TextPrompt("x"))

    async def clear_cache(self, model: str | None, tier: CacheTier) -> int:
        return 0


class Deaf:
    """A client that wants no notifications."""

    is_initialized = True

    async def notify(self, body: bytes) -> None:
        await anyio.lowlevel.checkpoint()

    def cancel(self, *, key: object, token: object) -> bool:
        return False

    def follow(self, subscription: object) -> str | None:
        return None

    def leave(self) -> None:
        pass


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


def answer(portal: BlockingPortal, method: str, params: object) -> Mapping[str, Any]:

    async def ask() -> bytes | None:
        return await DISPATCHER.answer(Call(Request(method, Raw(json.dumps(params).encode()), b"1"), Deaf(), Willing()))

    told = portal.call(ask)
    assert told is not None
    decoded: Mapping[str, Any] = json.loads(told)
    return decoded


# -- values of a schema -----------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
FRACTION = st.floats(-1e6, 1e6).filter(lambda number: not number.is_integer())
INTEGER = st.integers(-(2**53), 2**53)
ANYTHING = st.recursive(
    st.none() | st.booleans() | INTEGER | FRACTION | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return values(resolved(schema))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return st.one_of([values(each) for each in schema[several]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema.get("minimum", -(2**53)), schema.get("maximum", 2**53))
        case "number":
            low, over = schema.get("minimum", -1e6), schema.get("exclusiveMinimum")
            number = st.floats(low if over is None else over, schema.get("maximum", 1e6), exclude_min=over is not None)
            return number.filter(lambda value: not value.is_integer())
        case "string":
            return st.from_regex(schema["pattern"], fullmatch=True) if "pattern" in schema else text(schema)
        case "array":
            bounds = {"min_size": schema.get("minItems", 0), "max_size": min(schema.get("maxItems", 3), 3)}
            return st.lists(values(schema.get("items", {})), **bounds)
        case "object":
            return objects(schema)
        case None:
            return ANYTHING
        case other:
            raise NotImplementedError(other)


def text(schema: Mapping[str, Any]) -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8"), min_size=schema.get("minLength", 0), max_size=8)


def objects(schema: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    if "properties" not in schema:
        keys = values({"type": "string", **schema.get("propertyNames", {})})
        others = schema.get("additionalProperties")
        return st.dictionaries(keys, values(others if isinstance(others, dict) else {}), max_size=3)
    fields = {name: values(kind) for name, kind in schema["properties"].items()}
    needed = {name: fields.pop(name) for name in schema.get("required", ())}
    return st.fixed_dictionaries(needed, optional=fields)


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = DOCUMENT["components"]["schemas"][schema["$ref"].rsplit("/")[-1]]
    return found


@st.composite
def params_of(draw: st.DrawFn, method: str) -> dict[str, Any]:
    """What is required, and a few others."""
    schemas = {param["name"]: param["schema"] for param in SPOKEN[method]["params"]}
    required = [param["name"] for param in SPOKEN[method]["params"] if param["required"]]
    others = [name for name in schemas if name not in (*required, *JUST_ONE.get(method, ()))]
    few = draw(st.lists(st.sampled_from(others), max_size=3, unique=True)) if others else []
    if method in JUST_ONE:
        few.append(draw(st.sampled_from(JUST_ONE[method])))
    params = {name: draw(VALUES[method, name]) for name in (*required, *few)}
    assume(holds_together(method, params))
    return params


def holds_together(method: str, params: Mapping[str, Any]) -> bool:
    if method in JUST_ONE:
        return sum(params.get(name) is not None for name in JUST_ONE[method]) == 1
    return params.get("suffix") is None or isinstance(params["prompt"], str)


VALUES: Final = {
    (method, param["name"]): values(param["schema"]) for method, of in SPOKEN.items() for param in of["params"]
}
CHECKS: Final = {
    (method, param["name"]): jsonschema.Draft202012Validator({**param["schema"], "components": DOCUMENT["components"]})
    for method, of in SPOKEN.items()
    for param in of["params"]
}


# -- the properties ---------------------------------------------------------------------------------------------------

TAKING: Final = sorted(name for name, method in SPOKEN.items() if method["params"])


@pytest.mark.parametrize("method", sorted(SPOKEN))
@FEW
@given(data=st.data())
def test_what_the_document_allows_is_taken(portal: BlockingPortal, method: str, data: st.DataObject) -> None:
    params = data.draw(params_of(method))
    told = answer(portal, method, params)
    assert told.get("error", {}).get("code") not in (INVALID_PARAMS, INTERNAL), (told, params)


@pytest.mark.parametrize("method", TAKING)
@FEW
@given(data=st.data())
def test_a_changed_parameter_is_taken_just_where_the_document_allows_it(
    portal: BlockingPortal, method: str, data: st.DataObject
) -> None:
    params = data.draw(params_of(method))
    param = data.draw(st.sampled_from(SPOKEN[method]["params"]))
    name, value = param["name"], data.draw(ANYTHING)
    changed = {**params, name: value}
    allowed = CHECKS[method, name].is_valid(value)
    assume(not allowed or holds_together(method, changed))
    error = answer(portal, method, changed).get("error", {})
    assert (error.get("code") == INVALID_PARAMS) == (not allowed), (error, name, value)
    if not allowed:  # of two that exclude each other, either may be named
        assert error["data"]["field"].split("[")[0] in (name, *JUST_ONE.get(method, ()))


@pytest.mark.parametrize("method", sorted(SPOKEN))
@FEW
@given(data=st.data())
def test_a_parameter_that_the_document_does_not_name_is_refused(
    portal: BlockingPortal, method: str, data: st.DataObject
) -> None:
    known = {param["name"] for param in SPOKEN[method]["params"]}
    name = data.draw(TEXT.filter(lambda text: text not in known))
    error = answer(portal, method, {**data.draw(params_of(method)), name: 1}).get("error")
    if SPOKEN[method].get("x-ignores-other-params"):
        assert error is None
    else:
        assert (error["code"], error["data"]["field"]) == (INVALID_PARAMS, name)


@pytest.mark.parametrize(
    ("method", "name"),
    [(method, param["name"]) for method in TAKING for param in SPOKEN[method]["params"] if param["required"]],
)
@settings(FEW, max_examples=5)
@given(data=st.data())
def test_a_parameter_that_is_required_is_missed(
    portal: BlockingPortal, method: str, name: str, data: st.DataObject
) -> None:
    params = data.draw(params_of(method))
    del params[name]
    error = answer(portal, method, params)["error"]
    assert (error["code"], error["data"]["field"]) == (INVALID_PARAMS, name)


def test_the_document_is_what_rpc_discover_answers(portal: BlockingPortal) -> None:
    told = answer(portal, "rpc.discover", {})["result"]
    assert {**told, "info": None} == {**DOCUMENT, "info": None}
