"""The product as its README shows it: the demo model, pulled, served and asked by `omlxctl`."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.cli.running import Home, Outcome
from tests.e2e.living import Daemon, daemon_in_new_home, until

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon with the real demo model in a new home."""
    with daemon_in_new_home() as living:
        living.start()
        pulled = omlxctl(living.home, "pull", "demo")
        assert pulled.code == 0, pulled
        yield living


def omlxctl(home: Home, *arguments: str, stdin: bytes = b"") -> Outcome:
    return home.run("--no-start", *arguments, stdin=stdin)


def test_a_real_model_answers_a_question(daemon: Daemon) -> None:
    answer = omlxctl(daemon.home, "run", MODEL, QUESTION, "--temperature", "0", "--max-tokens", "20")
    assert answer.code == 0
    assert answer.text.strip() == "The capital of France is Paris."


def test_the_answer_as_one_json_document(daemon: Daemon) -> None:
    ask = ("run", MODEL, "-", "--json", "--temperature", "0", "--stop", " Paris")
    answer = omlxctl(daemon.home, *ask, stdin=b"Capital of France?")
    document = answer.document
    assert document["finish_reason"] == "stop"
    assert " Paris" not in document["text"]
    assert document["usage"]["prompt_tokens"] > 20  # the template's system message is in it


def test_four_clients_get_the_answer_that_one_gets(daemon: Daemon) -> None:
    params = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
    }
    alone = daemon.call("generate.complete", **params)
    with daemon.client() as client:
        calls = [client.start("generate.complete", params) for _ in range(4)]
        assert [call.result()["token_ids"] for call in calls] == [alone["token_ids"]] * 4


def test_the_same_seed_gives_the_same_story(daemon: Daemon) -> None:
    params = {"model": MODEL, "prompt": "A cat", "max_tokens": 12, "temperature": 0.9, "seed": 7}
    first, second = (daemon.call("generate.complete", **params) for _ in range(2))
    assert first["text"] == second["text"]
    assert daemon.call("generate.complete", **{**params, "seed": 8})["text"] != first["text"]


def test_ctrl_c_ends_the_request_and_not_the_daemon(daemon: Daemon) -> None:
    process = daemon.home.start("--no-start", "run", MODEL, "Tell a long story.", "--max-tokens", "400")
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    process.communicate()
    until(lambda: daemon.live() == 0)


def test_pulling_it_again_finds_it_there(daemon: Daemon) -> None:
    assert omlxctl(daemon.home, "pull", "demo").code == 0
    (entry,) = [entry for entry in daemon.call("models.list") if entry["name"] == MODEL]
    assert entry["size_bytes"] > 90_000_000
