"""The tier on disk from end to end: what CASES.md tells of other daemons does not happen here."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from omlxd.rpc.failures import RpcError
from tests.cli.running import Home
from tests.e2e.living import Daemon, daemon_in_new_home, until
from tests.models import write

PROMPT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
TOKENS = len(PROMPT)


def complete(daemon: Daemon, prompt: str = PROMPT, **params: Any) -> Any:
    return daemon.call(
        "generate.complete", model="tiny", prompt=prompt, max_tokens=4, temperature=0, return_token_ids=True, **params
    )


def ssd(daemon: Daemon) -> dict[str, Any]:
    return dict(daemon.call("daemon.status")["cache"]["ssd"])


def settled(daemon: Daemon) -> bool:
    return ssd(daemon)["queued_bytes"] == 0 and ssd(daemon)["counts"].get("written", 0) > 0


def test_weights_replaced_under_the_same_name_size_and_time_find_nothing(daemon: Daemon) -> None:
    folder = daemon.models / "tiny"
    complete(daemon)
    until(lambda: settled(daemon))
    daemon.signal()
    other = write("llama", daemon.home.path / "other", seed=2, eos=[])
    for path in folder.glob("*.safetensors"):
        stat = path.stat()
        shutil.copyfile(other / path.name, path)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    daemon.start()
    again = complete(daemon)
    assert again["usage"]["cached_tokens"] == 0
    assert again["token_ids"] == complete(daemon, cache=False)["token_ids"]


def test_keys_are_the_same_whatever_the_processs_hash_seed(daemon: Daemon) -> None:
    daemon.signal()
    daemon.start(PYTHONHASHSEED="1")
    complete(daemon)
    daemon.signal()
    daemon.start(PYTHONHASHSEED="2")
    assert complete(daemon)["usage"]["cached_tokens"] == TOKENS - 1


@pytest.mark.parametrize("place", ["file/cache", "missing/drive/cache"])
def test_without_its_directory_the_daemon_serves_and_says_so(place: str) -> None:
    with daemon_in_new_home() as daemon:
        write("llama", daemon.models / "tiny", eos=[])
        (daemon.home.path / "file").write_text("x")
        directory = daemon.home.path / place
        daemon.start(OMLXD_CACHE__SSD__DIR=str(directory))
        complete(daemon)
        assert complete(daemon)["usage"]["cached_tokens"] == TOKENS - 1
        until(lambda: ssd(daemon)["degraded"])
        assert str(directory.parent) in ssd(daemon)["reason"]
        assert not directory.exists()
        assert ssd(daemon)["state"] == "paused"
        with pytest.raises(RpcError) as raised:
            daemon.call("sessions.save", model="tiny", name="x", prompt=PROMPT)
        assert raised.value.data["kind"] == "storage_failed"


def test_a_disk_cache_that_is_switched_off_is_off(daemon: Daemon) -> None:
    daemon.signal()
    daemon.start(OMLXD_CACHE__SSD__ENABLED="false")
    complete(daemon)
    assert ssd(daemon)["state"] == "off"
    assert not list(daemon.home.path.glob("cache/*"))
    with pytest.raises(RpcError) as raised:
        daemon.call("sessions.save", model="tiny", name="x", prompt=PROMPT)
    assert raised.value.data["kind"] == "unsupported"


def test_a_bad_block_is_explained_and_verify_puts_it_right(daemon: Daemon) -> None:
    complete(daemon)
    until(lambda: settled(daemon))
    daemon.signal()
    for path in daemon.home.path.glob("cache/*/*.block.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    daemon.start()
    checked = daemon.call("cache.verify")
    assert checked["bad"] == checked["checked"] > 0
    assert checked["repaired"] >= checked["bad"]
    assert daemon.call("cache.explain", model="tiny", prompt=PROMPT)["reason"] == "bad_block"
    (line,) = daemon.call("cache.stats", model="tiny")
    assert line["bad_blocks"] == checked["bad"]
    assert complete(daemon)["usage"]["cached_tokens"] == 0
    until(lambda: settled(daemon))
    assert daemon.call("cache.verify") == {"checked": checked["checked"], "bad": 0, "repaired": 0}


def test_the_tree_shows_both_tiers_and_a_sessions_part_of_it(daemon: Daemon) -> None:
    complete(daemon)
    complete(daemon, "Something else altogether.")
    daemon.call("sessions.save", model="tiny", name="novel", prompt=PROMPT)
    nodes = daemon.call("cache.inspect", model="tiny")["nodes"]
    assert all(node["hot"] and node["ssd"] and node["bytes"] and node["last_used"] for node in nodes)
    held = daemon.call("cache.inspect", model="tiny", session="novel")["nodes"]
    assert held
    assert all(node["pins"] for node in held)
    assert PROMPT.startswith(held[0]["text_preview"])
    assert len(held) < len(nodes)


def test_files_and_directories_are_their_owners_alone(daemon: Daemon) -> None:
    daemon.call("sessions.save", model="tiny", name="novel", prompt=PROMPT)
    root = daemon.home.path / "cache"
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_session_survives_a_cap_that_takes_everything_else() -> None:
    with daemon_in_new_home() as daemon:
        write("llama", daemon.models / "tiny", eos=[])
        daemon.start(OMLXD_CACHE__SSD__MAX_BYTES="1MB", OMLXD_CACHE__SSD__MIN_FREE_BYTES="0")
        daemon.call("sessions.save", model="tiny", name="novel", prompt=PROMPT)
        for number in range(30):
            complete(daemon, f"{number} " + PROMPT)
        until(lambda: ssd(daemon)["queued_bytes"] == 0)
        assert ssd(daemon)["counts"]["evicted"] > 0
        assert du(daemon.home) <= 2**20
        daemon.signal()
        daemon.start(OMLXD_CACHE__SSD__MAX_BYTES="1MB", OMLXD_CACHE__SSD__MIN_FREE_BYTES="0")
        assert complete(daemon, PROMPT + "x", session="novel")["usage"]["cached_tokens"] == TOKENS - 1


def du(home: Home) -> int:
    return sum(path.stat().st_size for path in home.path.glob("cache/*/*.safetensors"))


def test_sessions_have_a_quota(daemon: Daemon) -> None:
    daemon.signal()
    daemon.start(OMLXD_SESSIONS__MAX_COUNT="1")
    daemon.call("sessions.save", model="tiny", name="one", prompt=PROMPT)
    daemon.call("sessions.save", model="tiny", name="one", prompt=PROMPT, replace=True)
    with pytest.raises(RpcError) as raised:
        daemon.call("sessions.save", model="tiny", name="two", prompt=PROMPT)
    assert "sessions.max_count allows 1" in str(raised.value)


def test_a_session_whose_blocks_are_spoilt_spoils_nothing_else(daemon: Daemon) -> None:
    daemon.call("sessions.save", model="tiny", name="bad", prompt=PROMPT)
    daemon.call("sessions.save", model="tiny", name="good", prompt="Other words. " * 20)
    keys = {node["key"] for node in daemon.call("cache.inspect", model="tiny", session="bad")["nodes"]}
    daemon.signal(signal.SIGKILL)
    for key in keys:
        (path,) = daemon.home.path.glob(f"cache/*/{key}.block.safetensors")
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    daemon.start()
    with pytest.raises(RpcError) as raised:
        daemon.call("sessions.export", model="tiny", name="bad", path=str(daemon.home.path / "bad.safetensors"))
    assert raised.value.data["kind"] == "storage_failed"
    spoilt = complete(daemon, PROMPT + "x", session="bad")
    assert spoilt["token_ids"] == complete(daemon, PROMPT + "x", cache=False)["token_ids"]
    good = complete(daemon, "Other words. " * 20 + "x", session="good")
    assert good["usage"]["cached_tokens"] == len("Other words. " * 20) - 1


def test_a_kill_between_two_saves_leaves_one_of_them_whole(daemon: Daemon) -> None:
    daemon.call("sessions.save", model="tiny", name="s", prompt=PROMPT[:100])
    daemon.signal(signal.SIGKILL)
    (saved,) = (daemon.home.path / "cache" / "sessions").glob("*.json")
    half = saved.with_suffix(".part")
    half.write_bytes(saved.read_bytes()[:50])  # as a kill in the second save leaves it
    daemon.start()
    (listed,) = daemon.call("sessions.list")
    assert listed["tokens"] == 99
    assert daemon.call("sessions.save", model="tiny", name="s", prompt=PROMPT, replace=True)["tokens"] == TOKENS - 1
    assert json.loads(saved.read_bytes())["name"] == "s"
    assert Path(half).exists() is False


def test_a_cap_that_is_lowered_while_the_daemon_runs_is_kept(daemon: Daemon) -> None:
    for number in range(8):
        complete(daemon, f"{number} " + PROMPT)
    until(lambda: settled(daemon))
    before = du(daemon.home)
    (daemon.home.path / "config.toml").write_text(
        f"[cache.ssd]\nmax_bytes = {before // 2}\nmin_free_bytes = 0\n[sessions]\nmax_count = 1\n"
    )
    keys = ["cache.ssd.max_bytes", "cache.ssd.min_free_bytes", "sessions.max_count"]
    assert daemon.call("daemon.reload") == {"applied": keys, "needs_restart": []}
    until(lambda: du(daemon.home) <= before // 2)
    assert ssd(daemon)["state"] == "on"
    assert complete(daemon, "7 " + PROMPT)["usage"]["cached_tokens"] == TOKENS + 1
    daemon.call("sessions.save", model="tiny", name="one", prompt=PROMPT)
    with pytest.raises(RpcError, match=r"sessions\.max_count allows 1"):
        daemon.call("sessions.save", model="tiny", name="two", prompt=PROMPT)


def test_after_a_restore_only_the_new_words_are_computed(daemon: Daemon) -> None:
    """CASES PS-21: what was named reaches the matcher, as the count of computed tokens shows."""
    daemon.call("sessions.save", model="tiny", name="s", prompt=PROMPT[:80])
    cold = complete(daemon, PROMPT[:90], cache=False)
    daemon.signal()
    daemon.start()
    warm = complete(daemon, PROMPT[:90], session="s")
    assert warm["token_ids"] == cold["token_ids"]
    (line,) = daemon.call("cache.stats", model="tiny")
    assert line["tokens_matched"] >= 79
    assert line["tokens_computed"] <= 11


def test_a_stop_writes_what_no_write_queue_has_room_for() -> None:
    """CASES PS-19: forty blocks are computed, and the daemon is told to stop at once."""
    with daemon_in_new_home() as daemon:
        write("llama", daemon.models / "tiny", eos=[])
        daemon.start(OMLXD_CACHE__BLOCK_SIZE="16")
        prompts = [f"{number:02} {PROMPT[:61]}" for number in range(10)]
        for prompt in prompts:
            complete(daemon, prompt)
        daemon.signal()
        daemon.start(OMLXD_CACHE__BLOCK_SIZE="16")
        assert [complete(daemon, prompt)["usage"]["cached_tokens"] for prompt in prompts] == [63] * 10
