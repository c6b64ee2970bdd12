"""The commands about models and the daemon's state: what they send and what people and programs get to see."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from omlxd.engine.api import DaemonInfo, DaemonStatus, LoadOptions, RequestInfo
from tests.cli.running import Home, Terminal
from tests.cli.serving import Daemon, serving
from tests.fakes import FakeBackend, entry


def test_models_lists_the_catalog_as_aligned_text(home: Home, daemon: Daemon) -> None:
    daemon.backend.models["a-longer-name"] = replace(
        entry("a-longer-name"), state="FAILED", size_bytes=98_000_000, error="no tokenizer\nin the directory"
    )
    assert home.run("models").text.splitlines() == [
        "NAME           STATE   KIND   SIZE   REMARK",
        "tiny           absent  llama  1 kB",
        "a-longer-name  failed  llama  98 MB  no tokenizer in the directory",
    ]
    assert [model["name"] for model in home.run("models", "--json").document] == ["tiny", "a-longer-name"]


def test_model_names_alone_are_for_completion(home: Home, daemon: Daemon) -> None:
    daemon.backend.models["other"] = entry("other")
    assert home.run("models", "--names").text == "tiny\nother\n"
    assert home.run("models", "--names", "--json").document == ["tiny", "other"]


def test_an_empty_catalog_says_how_to_get_a_model(home: Home, daemon: Daemon) -> None:
    daemon.backend.models.clear()
    outcome = home.run("models")
    assert (outcome.code, outcome.out) == (0, b"")
    assert "omlxctl pull demo" in outcome.errors[0]
    assert home.run("models", "--json").document == []


def test_load_sends_its_options(home: Home, daemon: Daemon) -> None:
    flags = "--pin --ttl 60 --kv-bits 8 --draft small --adapter ./lora"
    assert home.run("load", "tiny", *flags.split()).text == "loaded tiny (1 kB)\n"
    [(model, options)] = daemon.backend.loads
    assert model == "tiny"
    assert replace(options, adapter=None) == LoadOptions(pin=True, ttl_s=60, kv_bits=8, draft="small")
    assert options.adapter is not None
    assert options.adapter.startswith("/")
    assert options.adapter.endswith("/lora")


def test_load_and_unload_answer_json_with_the_entry(home: Home, daemon: Daemon) -> None:
    assert home.run("load", "tiny", "--json").document["state"] == "READY"
    assert home.run("unload", "tiny", "--now", "--json").document["freed_bytes"] == 1000


@pytest.mark.parametrize(
    ("source", "sent"), [("demo", "demo"), ("org/model", "org/model"), ("~/x", "{home}/x"), ("m.gguf", "{here}/m.gguf")]
)
def test_pull_sends_local_files_as_absolute_paths(home: Home, daemon: Daemon, source: str, sent: str) -> None:
    assert home.run("pull", source, "--name", "it").text == "pulled it (1 kB)\n"
    assert daemon.backend.pulls == [(sent.format(home=home.env["HOME"], here=os.getcwd()), "it")]


def test_a_download_is_drawn_on_a_terminal(home: Home, daemon: Daemon) -> None:
    terminal = Terminal(home, "pull", "demo")
    assert terminal.end() == 0
    terminal.close()
    assert b"\rdownloading 100 % (1 B of 1 B)" in terminal.seen


def test_tokenize_prints_the_ids_and_their_number(home: Home, daemon: Daemon) -> None:
    outcome = home.run("tokenize", "tiny", "abc")
    assert (outcome.text, outcome.errors) == ("97 98 99\n", ["3 tokens"])
    assert home.run("tokenize", "tiny", "--json", stdin=b"a\n").document == {"tokens": [97, 10], "count": 2}


class BusyBackend(FakeBackend):
    """Has a model in memory and a request that waits."""

    def status(self) -> DaemonStatus:
        model = replace(entry("tiny"), state="BUSY", requests=1, pinned=True, last_used=time.time() - 120.5)
        request = RequestInfo("r7", "tiny", "HELD", 900, 512, 0, 75.0, "waits for memory")
        cache = {
            "enabled": True,
            "bytes": {"hot": 98_000_000, "ssd": 0},
            "max_bytes": {"hot": 1_000_000_000, "ssd": 0},
            "prompt_tokens": 8000,
            "cached_tokens": 6000,
        }
        return replace(super().status(), models=[model, entry("other")], requests=[request], cache=cache)


@pytest.fixture
def busy(home: Home) -> Iterator[Daemon]:
    with serving(home, BusyBackend()) as daemon:
        yield daemon


def test_ps_shows_models_in_memory_and_live_requests(home: Home, busy: Daemon) -> None:
    lines = home.run("ps").text.splitlines()
    assert lines == [
        "MODEL  STATE  SIZE  REQUESTS  USED       REMARK",
        "tiny   busy   1 kB  1         2m 0s ago  pinned",
        "",
        "REQUEST  MODEL  STATE  PROMPT   ANSWER  AGE     REASON",
        "r7       tiny   held   512/900  0       1m 15s  waits for memory",
    ]
    document = home.run("ps", "--json").document
    assert [model["name"] for model in document["models"]] == ["tiny"]
    assert [request["id"] for request in document["requests"]] == ["r7"]


def test_ps_with_nothing_in_memory_says_so_beside_the_result(home: Home, daemon: Daemon) -> None:
    outcome = home.run("ps")
    assert (outcome.code, outcome.out, outcome.errors) == (0, b"", ["no model is in memory"])


def test_status_is_one_reading_for_people_and_programs(home: Home, busy: Daemon) -> None:
    lines = home.run("status").text.splitlines()
    assert lines[0] == "daemon    omlxd 0.1.0, protocol 1, pid 42"
    assert "models    1 in memory" in lines
    assert "cache     98 MB of 1.0 GB in memory, 6000 of 8000 prompt tokens reused" in lines
    assert lines[-1].split()[:3] == ["r7", "tiny", "held"]
    document = home.run("status", "--json").document
    assert document["info"]["pid"] == 42
    assert document["client"]["protocol"] == 1


class OldBackend(FakeBackend):
    """A daemon from before the last update."""

    def info(self) -> DaemonInfo:
        return replace(super().info(), version="0.0.9", protocol=0)


@pytest.fixture
def old(home: Home) -> Iterator[Daemon]:
    with serving(home, OldBackend()) as daemon:
        yield daemon


def test_status_of_an_older_daemon_shows_both_versions_and_what_to_do(home: Home, old: Daemon) -> None:
    text = home.run("status").text
    assert "omlxd 0.0.9, protocol 0" in text
    assert "omlxctl 0.1.0, protocol 1; they do not understand each other" in text
    assert "omlxctl shutdown" in text


@pytest.mark.parametrize("command", [["run", "hi"], ["chat"], ["load", "tiny"], ["tokenize", "tiny", "x"]])
def test_work_is_not_given_to_a_daemon_of_another_protocol(home: Home, old: Daemon, command: list[str]) -> None:
    outcome = home.run(*command, "--json", stdin=b"x")
    assert outcome.code == 1
    assert outcome.document["error"]["data"] == {"kind": "version_skew", "daemon_protocol": 0, "protocol": 1}
    assert "omlxctl shutdown" in outcome.errors[0]
    assert old.backend.requests == []


def test_an_older_daemon_can_be_stopped(home: Home, old: Daemon) -> None:
    assert home.run("shutdown").code == 0
    assert old.backend.shutdowns == [None]


def test_shutdown_passes_the_grace_on(home: Home, daemon: Daemon) -> None:
    assert home.run("shutdown", "--grace", "1.5", "--json").document is True
    assert daemon.backend.shutdowns == [1.5]
