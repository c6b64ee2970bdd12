"""What a session holds stays, whatever happens around it, and one that is not wanted costs nothing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from omlxd.cache.sessions import NoSuchSession, Quota, SessionIsThere, TooManySessions
from omlxd.cache.ssd_format import Model
from omlxd.cache.ssd_reader import Unreadable
from omlxd.cache.ssd_volume import INDEX
from tests.cache.running import PLENTY, generate, prompt
from tests.cache.shelves import flush, of_model, open_store

TOKENS = prompt(64)


def named(here) -> Model:
    return here.view.model


def save(store, here, name="s", tokens=TOKENS, *, may_replace=False):
    return store.save_session(named(here), name, tokens, may_replace=may_replace)


def test_a_session_ends_where_its_tokens_can_be_brought_back(tmp_path):
    store = open_store(tmp_path)
    here = of_model(store, "llama")
    with pytest.raises(Unreadable):
        save(store, here)  # nothing of it has been computed
    generate("llama", here.cache, TOKENS, n=2)
    session = save(store, here)
    assert session.num_tokens == 64
    assert session.nbytes > 0
    with pytest.raises(SessionIsThere):
        save(store, here)
    assert save(store, here, may_replace=True).created_at == session.created_at
    assert store.delete_session("", "s").name == "s"
    with pytest.raises(NoSuchSession):
        store.use_session("", "s")
    store.close(30)


def test_what_memory_has_and_the_disk_has_not_is_written_first(tmp_path):
    store = open_store(tmp_path)
    here = of_model(store, "llama")
    generate("llama", here.cache, TOKENS, n=2)
    flush(store)
    assert store.clear(None).result(30) > 0
    assert save(store, here).num_tokens == 64
    store.close(30)


@pytest.mark.parametrize("index_is_lost", [False, True])
def test_what_a_session_holds_is_never_evicted_or_cleared(tmp_path, index_is_lost):
    store = open_store(tmp_path)
    here = of_model(store, "llama")
    generate("llama", here.cache, TOKENS, n=2)
    one = save(store, here).nbytes
    store.close(30)
    if index_is_lost:
        for path in (tmp_path / "cache").glob(f"{INDEX}*"):
            path.unlink()
        open_store(tmp_path).close(30)
    store = open_store(tmp_path, max_bytes=2 * one)
    flush(store)
    here = of_model(store, "llama")
    for seed in range(1, 6):
        generate("llama", here.cache, prompt(64, seed), n=2)
        flush(store)
    store.clear(None).result(30)
    fresh = of_model(store, "llama")
    fresh.fetch(TOKENS)
    assert fresh.cache.match_length(TOKENS) == 63
    store.delete_session("", "s")
    store.clear(None).result(30)
    assert store.stats().used_bytes == 0
    store.close(30)


def test_quotas_are_of_all_sessions_together(tmp_path):
    store = open_store(tmp_path)
    here = of_model(store, "llama")
    generate("llama", here.cache, TOKENS, n=2)
    one = save(store, here).nbytes
    store.close(30)
    for quota, limit in ((Quota(1, PLENTY), "sessions.max_count"), (Quota(9, one + 1), "sessions.max_bytes")):
        store = open_store(tmp_path, quota=quota)
        here = of_model(store, "llama")
        generate("llama", here.cache, prompt(64, 1), n=2)
        with pytest.raises(TooManySessions, match=limit):
            save(store, here, "other", prompt(64, 1))
        assert save(store, here, may_replace=True).num_tokens == 64
        store.close(30)


def test_a_session_file_that_is_none_is_left_alone(tmp_path):
    store = open_store(tmp_path)
    here = of_model(store, "llama")
    generate("llama", here.cache, TOKENS, n=2)
    save(store, here)
    store.close(30)
    (path,) = (tmp_path / "cache" / "sessions").iterdir()
    for index, data in enumerate([b"", b"{}", b"[1]", b"not json", path.read_bytes()[:-9]]):
        path.with_name(f"{index}.json").write_bytes(data)
    store = open_store(tmp_path)
    assert [session.name for session in store.list_sessions(None)] == ["s"]
    store.close(30)
    assert len(list(path.parent.iterdir())) == 6


SEAMS = ["half written", "before rename", "after rename"]
CHILD = """
import os, signal, sys
from pathlib import Path
from omlxd.cache.disk import Disk
from tests.cache.shelves import of_model, open_store
from tests.cache.running import generate, prompt
seam, home = sys.argv[1], Path(sys.argv[2])
class Deadly(Disk):
    def die(self, where, path):
        if where == seam and path.parent.name == "sessions" and is_second:
            os.kill(os.getpid(), signal.SIGKILL)
    def write(self, path, parts, *, durable=False):
        self.path = path
        super().write(path, parts, durable=durable)
    def fill(self, fd, parts):
        parts = list(parts)
        if self.path.parent.name == "sessions" and is_second and seam == "half written":
            os.write(fd, parts[0][:len(parts[0]) // 2])
            self.die(seam, self.path)
        super().fill(fd, parts)
    def rename(self, old, new):
        self.die("before rename", new)
        super().rename(old, new)
        self.die("after rename", new)
store, is_second = open_store(home, disk=Deadly()), False
here = of_model(store, "llama")
generate("llama", here.cache, prompt(60), n=2)
store.save_session(here.view.model, "s", prompt(30), may_replace=False)
is_second = True
store.save_session(here.view.model, "s", prompt(60), may_replace=True)
"""


@pytest.mark.parametrize("seam", SEAMS)
def test_a_kill_in_a_second_save_leaves_the_first_or_the_second_whole(seam, tmp_path):
    """CASES PS-03: one file is the one moment of a save; what it holds is derived from it at the next start."""
    ended = subprocess.run([sys.executable, "-c", CHILD, seam, str(tmp_path)], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    store = open_store(tmp_path)
    (session,) = store.list_sessions(None)
    assert session.num_tokens == (60 if seam == "after rename" else 30)
    store.clear(None).result(30)  # but for what the session holds
    here = of_model(store, "llama")
    here.fetch([*prompt(60), 0])
    assert here.cache.match_length([*prompt(60), 0]) >= session.num_tokens
    assert save(store, here, tokens=prompt(30), may_replace=True).num_tokens == 30
    store.close(30)
