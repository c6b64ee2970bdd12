"""Several models in one daemon, each with its own life: nobody's coming and going is another's business."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from omlxd.rpc.client import Client
from tests.e2e.living import Daemon, daemon_in_new_home, until
from tests.models import write

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 5
TOKENS = len(PROMPT)  # one for each byte


@pytest.fixture(scope="module")
def living() -> Iterator[Daemon]:
    with daemon_in_new_home() as daemon:
        for seed, name in enumerate("abc"):
            write("llama", daemon.models / name, seed=seed, eos=[])
        daemon.start()
        yield daemon


@pytest.fixture
def daemon(living: Daemon) -> Daemon:
    """One for all tests of this file; no model is loaded, and nothing is stored."""
    for name in "abc":
        living.call("models.unload", model=name, now=True)
    living.call("cache.clear")
    return living


def ask(model: str, prompt: str = PROMPT, **changes: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **changes}


def lines(daemon: Daemon) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in daemon.call("models.list")}


def test_alternating_between_two_models_reloads_nothing_and_keeps_both_prefixes_warm(daemon: Daemon) -> None:
    cold = {name: daemon.call("generate.complete", **ask(name)) for name in "ab"}
    loaded_at = {name: lines(daemon)[name]["loaded_at"] for name in "ab"}
    for _ in range(4):
        for name in "ab":
            warm = daemon.call("generate.complete", **ask(name))
            assert warm["usage"]["cached_tokens"] == TOKENS - 1
            assert warm["text"] == cold[name]["text"]
    assert {name: lines(daemon)[name]["loaded_at"] for name in "ab"} == loaded_at


def test_ten_first_requests_load_their_model_once(daemon: Daemon) -> None:
    """PL-03."""
    told: list[dict[str, Any]] = []
    with Client.connect(daemon.home.socket, on_notification=lambda method, params: told.append(params)) as client:
        client.call("events.subscribe", {"topics": ["models"]})
        calls = [client.start("generate.complete", ask("c", f"{n}")) for n in range(10)]
        assert [call.result()["usage"]["completion_tokens"] for call in calls] == [4] * 10
    assert [each["state"] for each in told].count("LOADING") == 1


def test_the_end_of_one_models_idle_time_leaves_anothers_stream_and_cache_alone(daemon: Daemon) -> None:
    """PL-07: a goes while b answers; who comes for a just then finds it there, or loads it anew."""
    whole = daemon.call("generate.complete", **ask("b", max_tokens=100))["text"]
    daemon.call("models.load", model="a", ttl_s=0.05)
    daemon.call("generate.complete", **ask("a"))
    with daemon.client() as client:
        stream = client.start("generate.complete", ask("b", max_tokens=100, stream=True))
        until(lambda: lines(daemon)["a"]["state"] == "ABSENT")
        late = daemon.call("generate.complete", **ask("a"))
        assert stream.result(timeout_s=60)["text"] == whole
    assert late["usage"]["cached_tokens"] == TOKENS - 1
    assert daemon.call("generate.complete", **ask("b"))["usage"]["cached_tokens"] == TOKENS - 1
    assert lines(daemon)["b"]["state"] == "READY"


def test_a_model_with_an_adapter_keeps_it_for_every_request(daemon: Daemon, tmp_path: Path) -> None:
    """ML-15."""
    plain = daemon.call("generate.complete", **ask("a", max_tokens=12))["text"]
    daemon.call("models.unload", model="a")
    daemon.call("models.load", model="a", adapter=str(adapter(daemon.models / "a", tmp_path)))
    ids = daemon.call("tokenize", model="a", text=PROMPT)["tokens"]
    answers = [daemon.call("generate.complete", **ask("a", max_tokens=12))["text"] for _ in range(2)]
    answers.append(daemon.call("generate.complete", **ask("a", ids, max_tokens=12))["text"])  # type: ignore[arg-type]
    assert len(set(answers)) == 1
    assert answers[0] != plain
    daemon.call("models.unload", model="a")
    assert daemon.call("generate.complete", **ask("a", max_tokens=12))["text"] == plain


def adapter(model_folder: Path, directory: Path) -> Path:
    """A LoRA adapter that changes what the model says."""
    settings = {"num_layers": 2, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
    model, _ = load_model(model_folder)
    model.freeze()
    linear_to_lora_layers(model, settings["num_layers"], settings["lora_parameters"])
    weights = {name: mx.full(array.shape, 0.05) for name, array in tree_flatten(model.trainable_parameters())}
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    (directory / "adapter_config.json").write_text(json.dumps(settings | {"fine_tune_type": "lora"}))
    return directory
