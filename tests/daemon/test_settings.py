"""Settings: one file, the environment over it, and no silent defaults."""

import re
from pathlib import Path

import pytest

from omlxd.daemon import settings
from omlxd.daemon.settings import ConfigError, Settings, load, readings

GIB = 1024**3


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "config.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_missing_file_means_defaults(tmp_path: Path):
    assert load(str(tmp_path / "config.toml"), {}) == Settings()


def test_the_defaults_are_those_of_the_protocol():
    s = Settings()
    assert (s.daemon.grace_s, s.daemon.idle_exit_s) == (10, 0)
    assert (s.log.level, s.log.json, s.log.content, s.log.max_bytes, s.log.keep) == ("info", False, False, 20 << 20, 5)
    assert (s.rpc.max_frame_bytes, s.rpc.max_in_flight) == (64 << 20, 256)
    assert (s.models.dirs, s.models.default, s.models.autoload) == ((), None, True)
    assert (s.models.ttl_s, s.models.allow_remote_code) == (0, False)
    assert (s.engine.max_batch, s.engine.max_queue, s.engine.prefill_chunk) == (32, 256, 2048)
    assert (s.engine.max_decode_stall_ms, s.engine.max_chunk_ms) == (80, 250)
    assert (s.cache.enabled, s.cache.block_size, s.cache.hot.max_bytes) == (True, 256, None)
    assert (s.cache.ssd.enabled, s.cache.ssd.dir) == (True, None)
    assert (s.cache.ssd.max_bytes, s.cache.ssd.min_free_bytes) == (50 * GIB, 10 * GIB)
    assert (s.sessions.max_count, s.sessions.max_bytes) == (1000, 20 * GIB)
    assert (s.memory.tier, s.memory.limit_bytes, s.memory.wired_limit_bytes) == ("balanced", None, None)
    assert (s.images.allow_paths, s.images.allow_urls, s.images.max_pixels) == ((), False, 40_000_000)
    assert s.images.features_max_bytes == GIB // 4


def test_the_file_sets_keys_of_nested_tables(tmp_path: Path):
    path = write(tmp_path, '[engine]\nmax_batch = 4\n[cache.ssd]\nmax_bytes = "3GB"\n[models]\ndirs = ["/m", "~/n"]\n')
    got = load(path, {})
    assert got.engine.max_batch == 4
    assert got.cache.ssd.max_bytes == 3 * GIB
    assert got.models.dirs == ("/m", str(Path.home() / "n"))
    assert got.engine.max_queue == 256


def test_the_environment_wins_over_the_file(tmp_path: Path):
    path = write(tmp_path, "[engine]\nmax_batch = 4\nmax_queue = 5\n")
    got = load(path, {"OMLXD_ENGINE__MAX_BATCH": "8", "OMLXD_CACHE__SSD__MAX_BYTES": "0", "PATH": "/bin"})
    assert (got.engine.max_batch, got.engine.max_queue, got.cache.ssd.max_bytes) == (8, 5, 0)


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("OMLXD_LOG__JSON", "true", "log.json", True),
        ("OMLXD_LOG__JSON", "0", "log.json", False),
        ("OMLXD_DAEMON__GRACE_S", "2.5", "daemon.grace_s", 2.5),
        ("OMLXD_MODELS__DIRS", "/a:/b", "models.dirs", ("/a", "/b")),
        ("OMLXD_MODELS__DIRS", '["/a:b"]', "models.dirs", ("/a:b",)),
        ("OMLXD_MEMORY__LIMIT_BYTES", "1.5 GiB", "memory.limit_bytes", 3 * GIB // 2),
        ("OMLXD_CACHE__HOT__MAX_BYTES", "auto", "cache.hot.max_bytes", None),
        ("OMLXD_LOG__LEVEL", "debug", "log.level", "debug"),
    ],
)
def test_every_type_of_key_can_be_written_as_text(tmp_path: Path, name: str, text: str, key: str, value: object):
    found = {r.key: (r.value, r.source) for r in readings(str(tmp_path / "none"), {name: text})}
    assert found[key] == (value, "env")


def test_home_socket_and_empty_variables_are_no_settings(tmp_path: Path):
    env = {"OMLXD_HOME": "/h", "OMLXD_SOCKET": "/s", "OMLXD_ENGINE__MAX_BATCH": ""}
    assert load(str(tmp_path / "none"), env) == Settings()


def test_each_value_tells_its_source(tmp_path: Path):
    path = write(tmp_path, "[engine]\nmax_batch = 4\n")
    sources = {r.key: r.source for r in readings(path, {"OMLXD_ENGINE__MAX_QUEUE": "3"})}
    assert sources["engine.max_batch"] == "file"
    assert sources["engine.max_queue"] == "env"
    assert sources["engine.prefill_chunk"] == "default"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[engine]\nmax_bach = 4\n", r"unknown key engine.max_bach \(= 4\); the nearest known key is engine.max_batch"),
        ("[enginee]\nmax_batch = 4\n", r"unknown key enginee.max_batch .* nearest known key is engine.max_batch"),
        ("max_batch = 4\n", r"unknown key max_batch .* nearest known key is engine.max_batch"),
        ("cache = 3\n", r"cache is a table, not 3; write \[cache\]"),
        ("[engine]\nmax_batch = '4'\n", r"engine.max_batch takes a whole number from 1 to 4096, not '4'"),
        ("[engine]\nmax_batch = true\n", r"engine.max_batch takes a whole number .* not True"),
        ("[engine]\nmax_batch = 0\n", r"engine.max_batch takes a whole number from 1 to 4096, not 0"),
        ("[engine.max_batch]\nx = 1\n", r"engine.max_batch takes a whole number .* not {'x': 1}"),
        ("[log]\njson = 1\n", r"log.json takes true or false, not 1"),
        ("[log]\nlevel = 'loud'\n", r'log.level takes one of "debug", "info", "warning", "error", not .loud.'),
        ("[daemon]\ngrace_s = -1\n", r"daemon.grace_s takes a number of 0 or more, not -1"),
        ("[daemon]\ngrace_s = inf\n", r"daemon.grace_s takes a number of 0 or more, not inf"),
        ("[daemon]\ngrace_s = nan\n", r"daemon.grace_s takes a number"),
        ("[cache.ssd]\nmax_bytes = '20 apples'\n", r"cache.ssd.max_bytes takes bytes or a size such as \"20GB\""),
        ("[cache.ssd]\nmax_bytes = -1\n", r"cache.ssd.max_bytes takes bytes .* at least 0, not -1"),
        ("[cache.hot]\nmax_bytes = 'car'\n", r"cache.hot.max_bytes .* or \"auto\", not 'car'"),
        ("[models]\ndirs = '/m'\n", r"models.dirs takes a list of absolute paths, not '/m'"),
        ("[models]\ndirs = ['m']\n", r"models.dirs takes an absolute path, or one that begins with ~/, not \['m'\]"),
        ("[models]\ndefault = ''\n", r"models.default takes a text that is not empty"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_the_file(tmp_path: Path, text: str, complaint: str):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load(path, {})
    assert str(caught.value).startswith(f"{path}: ")


def test_a_wrong_variable_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"variable OMLXD_ENGINE__MAX_BACH: unknown key engine.max_bach"):
        load(str(tmp_path / "none"), {"OMLXD_ENGINE__MAX_BACH": "4"})
    with pytest.raises(ConfigError, match=r"variable OMLXD_ENGINE__MAX_BATCH: engine.max_batch takes a whole number"):
        load(str(tmp_path / "none"), {"OMLXD_ENGINE__MAX_BATCH": "many"})


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[engine]\nmax_ba",
        b'[cache.ssd]\nmax_bytes = "5',
        b"\0" * 64,
        b"[engine\n",
        b"\xff\xfe",
        b"a = " + b"[" * 9999,
    ],
    ids=["empty", "half a key", "half a value", "zeros", "half a table", "not UTF-8", "nested beyond reason"],
)
def test_a_torn_file_is_an_error_and_stays_for_its_owner_to_see(tmp_path: Path, damage: bytes):
    path = write(tmp_path, damage)
    with pytest.raises(ConfigError, match=r"restore it|mend it"):
        load(path, {})
    assert Path(path).read_bytes() == damage


def test_an_unreadable_file_is_an_error(tmp_path: Path):
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load(str(tmp_path / "config.toml"), {})


def test_the_default_file_changes_nothing(tmp_path: Path):
    assert load(write(tmp_path, settings.default_file()), {}) == Settings()


def test_the_default_file_shows_every_key_with_its_default(tmp_path: Path):
    uncommented = re.sub(r"^# (?=\w+ = )", "", settings.default_file(), flags=re.MULTILINE)
    shown = readings(write(tmp_path, uncommented), {})
    assert [r.key for r in shown if r.source != "file"] == []
    unset = {"models.default", "cache.ssd.dir", "memory.limit_bytes", "memory.wired_limit_bytes"}  # shown by example
    defaults = readings(str(tmp_path / "none"), {})
    assert [(r.key, r.value) for r in shown if r.key not in unset] == [
        (r.key, r.value) for r in defaults if r.key not in unset
    ]


def test_the_page_on_settings_has_a_row_for_every_key_with_its_default(tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    rows = re.findall(r"^\| `([a-z_.]+)` \| (?:`(.+?)`|unset) \|", page, flags=re.MULTILINE)
    defaults = readings(str(tmp_path / "none"), {})
    assert [key for key, _ in rows] == [r.key for r in defaults]
    path = write(tmp_path, "".join(f"{key} = {default}\n" for key, default in rows if default))
    assert [(r.key, r.value) for r in readings(path, {})] == [(r.key, r.value) for r in defaults]
