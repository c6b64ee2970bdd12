"""The log: readable, bounded, and silent about nothing it should say."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from omlxd.daemon.logs import Counted, JsonLines, Lines, trim_output

SET_UP = """
import logging, sys
from omlxd.daemon import logs
from omlxd.daemon.settings import LogSettings
settings = LogSettings(level="info", max_bytes=1 << 20, keep=3)
logs.set_up(sys.argv[1], settings, as_json="json" in sys.argv, to_stderr="stderr" in sys.argv)
log = logging.getLogger("omlxd.daemon.test")
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", SET_UP + code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "omlxd.log"


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def record(message: str, *arguments: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("omlxd.x", level, __file__, 1, message, arguments, None)


def test_a_person_reads_time_level_place_and_text(file: Path):
    shown = run("log.info('model %s is ready', 'tiny')", str(file), "stderr").stderr
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO omlxd\.daemon\.test: model tiny is ready\n", shown)
    assert file.read_text() == shown
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_program_reads_one_object_per_line(file: Path):
    run("try: 1 / 0\nexcept ZeroDivisionError: log.exception('it %s', 'broke\\nhere')", str(file), "json")
    (line,) = file.read_text().splitlines()
    read = json.loads(line)
    assert (read["level"], read["logger"], read["message"]) == ("error", "omlxd.daemon.test", "it broke\nhere")
    assert read["at"] > 1.7e9
    assert "ZeroDivisionError" in read["traceback"]


def test_under_a_supervisor_standard_error_stays_empty(file: Path):
    assert run("log.error('x')", str(file)).stderr == ""


FAILS = """
log = logging.getLogger("omlxd.rpc.dispatch")
def fails(error):
    try:
        try: raise KeyError("the PROMPT")
        finally: raise error
    except Exception: log.exception("internal error e1")
fails(ValueError("the PROMPT"))
fails(OSError(28, "No space left on device"))
"""


@pytest.mark.parametrize("form", ["lines", "json"])
def test_an_exception_that_a_request_may_have_caused_is_told_without_quoting_it(file: Path, form: str):
    run(FAILS, str(file), form)
    text = file.read_text()
    assert "PROMPT" not in text
    for told in ("internal error e1", "in fails", "KeyError: (its message", "ValueError: (its message"):
        assert told in text
    assert "OSError: [Errno 28] No space left on device" in text


def test_where_content_is_allowed_its_message_is_shown(file: Path):
    run("logs.set_content(True)" + FAILS, str(file))
    assert "ValueError: the PROMPT" in file.read_text()


def test_what_is_given_to_the_content_logger_is_written_only_where_that_is_allowed(file: Path):
    code = "log = logging.getLogger(logs.CONTENT)\nlog.error('a secret')\nlogs.set_content(True)\nlog.info('an answer')"
    run("logs.set_level('debug')\n" + code, str(file))
    assert "secret" not in file.read_text()
    assert file.read_text().endswith("INFO omlxd.content: an answer\n")


def test_the_file_of_a_supervisor_is_emptied_once_it_has_grown(file: Path):
    file.parent.mkdir()
    for size, left in ((1000, 1000), (2_000_000, 0)):
        with file.open("ab") as output:
            output.truncate(size)
            trim_output(output.fileno())
        assert file.stat().st_size == left


def test_debug_lines_and_libraries_chatter_are_left_out(file: Path):
    run("log.debug('a'); logging.getLogger('httpx').info('b'); logging.getLogger('httpx').warning('c')", str(file))
    assert file.read_text().endswith("WARNING httpx: c\n")
    assert len(file.read_text().splitlines()) == 1


def test_a_flood_of_failures_stays_within_the_files_that_are_kept(file: Path):
    run("for i in range(20000): log.error('request %d failed: ' + 'x' * 100, i)", str(file))
    text = file.read_text()
    assert len(text.splitlines()) == 6
    assert "19995 more like this: request %d failed" in text


def test_different_lines_are_rotated_and_the_oldest_go(file: Path):
    run("for i in range(20000): log.info('%d %s', i, 'x' * 400)", str(file))
    sizes = [path.stat().st_size for path in file.parent.iterdir()]
    assert len(sizes) == 4
    assert sum(sizes) <= 4 << 20
    assert "19999 x" in file.read_text()


def test_a_huge_line_is_cut(file: Path):
    run("log.info('y' * 3_000_000)", str(file))
    assert file.stat().st_size < 9000
    assert "(2992" in file.read_text()


def test_a_repeated_warning_is_written_five_times_a_minute_and_then_counted():
    now, kept = [0.0], Kept()
    handler = Counted([kept], clock=lambda: now[0])
    for i in range(8):
        handler.handle(record("disk full at %d", i))
    now[0] = 59.0
    handler.handle(record("disk full at %d", 8))
    assert kept.lines == [f"disk full at {i}" for i in range(5)]
    now[0] = 61.0
    handler.handle(record("disk full at %d", 9))
    assert kept.lines[5:] == ["4 more like this: disk full at %d", "disk full at 9"]


def test_other_warnings_and_plain_news_pass_by_a_repeated_one():
    kept = Kept()
    handler = Counted([kept], clock=lambda: 0.0)
    for _ in range(7):
        handler.handle(record("a"))
        handler.handle(record("news", level=logging.INFO))
    handler.handle(record("b"))
    assert [kept.lines.count(line) for line in ("a", "news", "b")] == [5, 7, 1]


def test_what_was_counted_is_told_at_the_end():
    kept = Kept()
    handler = Counted([kept], clock=lambda: 0.0)
    for _ in range(7):
        handler.handle(record("a"))
    handler.close()
    assert kept.lines[5:] == ["2 more like this: a"]


def test_warnings_beyond_count_are_written_each():
    kept = Kept()
    handler = Counted([kept], clock=lambda: 0.0)
    for i in range(300):
        handler.handle(record(f"warning {i}"))
    assert len(kept.lines) == 300


@pytest.mark.parametrize("formatter", [Lines(), JsonLines()])
def test_a_line_says_how_much_of_it_was_cut(formatter: logging.Formatter):
    assert "characters more)" in formatter.format(record("z" * 9000))
