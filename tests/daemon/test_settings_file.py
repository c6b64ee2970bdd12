"""Changing the settings file keeps what is there, whoever else writes."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd.daemon import settings
from omlxd.daemon.settings import ConfigError, load
from omlxd.daemon.settings_file import create_default, set_key


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "home" / "config.toml"


def test_a_key_is_set_and_comments_and_unknown_keys_stay(config: Path):
    config.parent.mkdir()
    config.write_text("# mine\n[engine]\nmax_batch = 4 # few\nfrom_the_future = 1\n\n[log]\nkeep = 2\n")
    set_key(str(config), "engine.max_batch", "8")
    set_key(str(config), "log.json", "true")
    assert config.read_text() == (
        "# mine\n[engine]\nmax_batch = 8 # few\nfrom_the_future = 1\n\n[log]\nkeep = 2\njson = true\n"
    )


def test_a_size_stays_as_it_was_written(config: Path):
    set_key(str(config), "cache.ssd.max_bytes", "3GB")
    assert 'max_bytes = "3GB"\n' in config.read_text()
    assert load(str(config), {}).cache.ssd.max_bytes == 3 * 1024**3


def test_a_first_key_makes_the_commented_file(config: Path):
    set_key(str(config), "models.dirs", "/a:/b")
    set_key(str(config), "memory.limit_bytes", "1GB")
    got = load(str(config), {})
    assert got.models.dirs == ("/a", "/b")
    assert got.memory.limit_bytes == 1024**3
    assert "# max_queue = 256" in config.read_text()


def test_an_empty_file_can_be_set(config: Path):
    config.parent.mkdir()
    config.touch()
    set_key(str(config), "cache.hot.max_bytes", "auto")
    assert config.read_text() == '[cache.hot]\nmax_bytes = "auto"\n'


@pytest.mark.parametrize(("key", "text"), [("engine.max_bach", "4"), ("engine.max_batch", "many"), ("engine", "4")])
def test_a_wrong_key_or_value_changes_nothing(config: Path, key: str, text: str):
    create_default(str(config))
    with pytest.raises(ConfigError, match=f"config set: .*{key}"):
        set_key(str(config), key, text)
    assert config.read_text() == settings.default_file()


@pytest.mark.parametrize("damage", [b"[engine\n", b"\xff", b"engine = 3\n"])
def test_a_torn_file_is_not_written_over(config: Path, damage: bytes):
    config.parent.mkdir()
    config.write_bytes(damage)
    with pytest.raises(ConfigError, match="nothing was changed"):
        set_key(str(config), "engine.max_batch", "4")
    assert config.read_bytes() == damage


def test_the_default_file_is_written_once_and_only_for_its_owner(config: Path):
    create_default(str(config))
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    set_key(str(config), "engine.max_batch", "8")
    create_default(str(config))
    assert load(str(config), {}).engine.max_batch == 8
    assert stat.S_IMODE(config.stat().st_mode) == 0o600


def test_a_linked_file_stays_a_link(config: Path, tmp_path: Path):
    config.parent.mkdir()
    (tmp_path / "dotfile.toml").write_text("[log]\nkeep = 2\n")
    config.symlink_to(tmp_path / "dotfile.toml")
    set_key(str(config), "log.keep", "3")
    assert config.is_symlink()
    assert load(str(config), {}).log.keep == 3


def test_two_writers_lose_neither_value(config: Path):
    code = (
        "import sys; from omlxd.daemon.settings_file import set_key\n"
        "for i in range(1, 26): set_key(*sys.argv[1:], str(i))"
    )
    keys = ["engine.max_batch", "engine.max_queue", "log.keep"]
    writers = [subprocess.Popen([sys.executable, "-c", code, str(config), key]) for key in keys]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    got = load(str(config), {})
    assert (got.engine.max_batch, got.engine.max_queue, got.log.keep) == (25, 25, 25)
    assert sorted(os.listdir(config.parent)) == ["config.toml", "config.toml.lock"]


def test_a_reader_sees_the_old_or_the_new_file_never_a_part(config: Path):
    create_default(str(config))
    before = config.stat().st_ino
    with config.open() as reader:
        set_key(str(config), "engine.max_batch", "8")
        assert reader.read() == settings.default_file()
    assert config.stat().st_ino != before


def test_a_writer_killed_at_any_moment_leaves_a_whole_file_and_no_lock(config: Path):
    code = (
        "import itertools, sys; from omlxd.daemon.settings_file import set_key\n"
        "for i in itertools.count(1): set_key(sys.argv[1], 'engine.max_queue', str(i)); print(i, flush=True)"
    )
    for round in range(1, 4):
        writer = subprocess.Popen([sys.executable, "-c", code, str(config)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        for _ in range(3 * round):
            last = writer.stdout.readline()
        writer.kill()
        writer.communicate()
        assert load(str(config), {}).engine.max_queue >= int(last)
        set_key(str(config), "log.keep", str(round))
        assert load(str(config), {}).log.keep == round
