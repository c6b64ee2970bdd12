"""`omlxctl cache`: what it sends, and what people and programs get to see of the answer."""

import json
from dataclasses import replace

import pytest

from omlxd.engine.api import CacheNode, ChatPrompt, TextPrompt
from tests.cli.running import Home
from tests.cli.serving import Daemon
from tests.fakes import entry


def test_stats_are_a_table_for_people_and_the_daemons_own_words_for_programs(home: Home, daemon: Daemon) -> None:
    daemon.backend.models["a-longer-name"] = entry("a-longer-name")
    assert home.run("cache", "stats").text.splitlines() == [
        "MODEL          HITS  MISSES  REUSED       COMPUTED  HOT/SSD  CHECKPOINTS  HOT    SSD  EVICTED",
        "tiny           3     1       6000 (75 %)  2000      24/0     2            98 MB  0 B  5",
        "a-longer-name  3     1       6000 (75 %)  2000      24/0     2            98 MB  0 B  5",
    ]
    [line] = home.run("cache", "stats", "tiny", "--json").document
    assert (line["model"], line["bytes"]) == ("tiny", {"hot": 98_000_000, "ssd": 0})


def test_stats_without_a_cache_say_so_beside_the_result(home: Home, daemon: Daemon) -> None:
    daemon.backend.models.clear()
    outcome = home.run("cache", "stats")
    assert (outcome.code, outcome.out, len(outcome.errors)) == (0, b"", 1)


def test_explain_shows_what_is_stored_and_what_was_asked(home: Home, daemon: Daemon) -> None:
    assert home.run("cache", "explain", "tiny", "--text", "hello mars\n").text.splitlines() == [
        "6 of 11 tokens would be reused: it differs from what is stored, from token 6 on",
        'stored  "hello world"',
        'prompt  "hello mars\\n"',
    ]
    assert home.run("cache", "explain", "tiny", "--text", "--json", stdin=b"hello").document == {
        "prompt_tokens": 5,
        "matched_tokens": 5,
        "reason": "full",
    }


def test_warm_sends_the_prompt_as_run_would(home: Home, daemon: Daemon) -> None:
    outcome = home.run("cache", "warm", "tiny", "hello", "--system", "be kind")
    assert outcome.text == "5 tokens are warm, 2 of them were before\n"
    [request] = daemon.backend.requests
    assert request.warm
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
    ]


def test_warm_takes_raw_text_and_whole_conversations(home: Home, daemon: Daemon) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    assert home.run("cache", "warm", "tiny", "--text", "once", "--json").document == {
        "prompt_tokens": 4,
        "cached_tokens": 2,
    }
    assert home.run("cache", "warm", "tiny", "--messages", "-", stdin=json.dumps(messages).encode()).code == 0
    text, chat = (request.prompt for request in daemon.backend.requests)
    assert text == TextPrompt("once")
    assert isinstance(chat, ChatPrompt)
    assert chat.messages == messages


def test_clear_says_what_came_free(home: Home, daemon: Daemon) -> None:
    assert home.run("cache", "clear").text == "4 kB freed\n"
    assert home.run("cache", "clear", "tiny", "--tier", "ssd", "--json").document == {"freed_bytes": 0}
    assert daemon.backend.clears == [(None, "all"), ("tiny", "ssd")]


@pytest.mark.parametrize(
    "words",
    [
        ["stats", "a", "b"],
        ["explain"],
        ["warm", "a", "b", "c"],
        ["melt"],
        ["warm", "tiny", "x", "--text", "--system", "y"],
        ["warm", "tiny", "not json", "--messages"],
        ["warm", "tiny", "{}", "--messages"],
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(home: Home, daemon: Daemon, words: list[str]) -> None:
    assert home.run("cache", *words).code == 2
    assert daemon.backend.requests == []


def test_looking_at_the_cache_starts_no_daemon(home: Home) -> None:
    assert home.run("cache", "stats").code == 3
    assert home.run("cache", "clear").code == 3


def test_the_metrics_can_be_had_as_text(home: Home, daemon: Daemon) -> None:
    outcome = home.run("rpc", "daemon.metrics", '{"format": "prometheus"}', "--json")
    assert outcome.document.startswith("# TYPE omlxd_uptime_seconds gauge\n")


def node(key: str, parent: str, start: int, tokens: int, **changes: object) -> CacheNode:
    plain = CacheNode(key, parent, start, tokens, False, True, True, 9000, None, 0, "be kind")
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_inspect_draws_who_shares_what(home: Home, daemon: Daemon) -> None:
    daemon.backend.nodes = [
        node("a", "root", 0, 256),
        node("b", "a", 256, 256, hot=False, pins=1),
        node("c", "b", 512, 10),
        node("d", "b", 512, 256, ssd=False),
        node("e", "d", 768, 3, is_checkpoint=True),
    ]
    assert home.run("cache", "inspect", "tiny").text.splitlines() == [
        '0-256  hot+ssd  9 kB  "be kind"',
        '256-512  ssd  9 kB  held 1x  "be kind"',
        '├─ 512-522  hot+ssd  9 kB  "be kind"',
        '└─ 512-768  hot  9 kB  "be kind"',
        "   checkpoint at 771  hot+ssd  9 kB",
    ]
    [only] = home.run("cache", "inspect", "tiny", "--limit", "1", "--json").document["nodes"]
    assert (only["key"], only["tokens"], only["checkpoint"]) == ("a", 256, False)


def test_verify_says_what_it_read(home: Home, daemon: Daemon) -> None:
    assert home.run("cache", "verify").text == "0 files read, 0 bad, 0 repairs\n"
    assert home.run("cache", "verify", "--json").document == {"checked": 0, "bad": 0, "repaired": 0}
