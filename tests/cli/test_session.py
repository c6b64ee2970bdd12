"""`omlxctl session`: names for conversations, as people and programs see them."""

import pytest

from tests.cli.running import Home
from tests.cli.serving import Daemon


def test_a_session_is_saved_listed_and_removed(home: Home, daemon: Daemon) -> None:
    assert home.run("session", "save", "tiny", "novel", "hello", "--text").text == (
        "saved novel: 5 tokens, 4 kB held on disk\n"
    )
    refused = home.run("session", "save", "tiny", "novel", "hello", "--text")
    assert refused.code == 1
    assert "'novel' already" in refused.errors[0]
    assert home.run("session", "save", "tiny", "novel", "hello", "--text", "--replace", "--quiet").code == 0
    head, line = home.run("session", "list").text.splitlines()
    assert head.split() == ["NAME", "MODEL", "TOKENS", "SIZE", "USED"]
    assert line.split()[:5] == ["novel", "tiny", "5", "4", "kB"]
    [entry] = home.run("session", "list", "tiny", "--json").document
    assert (entry["name"], entry["tokens"]) == ("novel", 5)
    assert home.run("session", "rm", "tiny", "novel").text.startswith("removed novel")
    missing = home.run("session", "rm", "tiny", "novel", "--json")
    assert missing.document["error"]["data"]["kind"] == "session_not_found"


def test_files_are_named_absolutely_to_the_daemon(home: Home, daemon: Daemon) -> None:
    assert home.run("session", "import", "tiny", "novel", "x.safetensors").text.startswith("imported novel:")
    [entry] = home.run("session", "list", "--json").document
    assert entry["tokens"] > len("x.safetensors") + 1  # the fake's tokens are the path's bytes
    assert home.run("session", "export", "tiny", "novel", "y.safetensors").text.startswith("exported novel:")


@pytest.mark.parametrize("words", [["save", "tiny"], ["list", "a", "b"], ["rm", "tiny"], ["export", "tiny", "x"]])
def test_another_number_of_words_is_a_usage_error(home: Home, words: list[str]) -> None:
    assert home.run("session", *words).code == 2
