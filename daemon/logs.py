"""The daemon's log: one line per event for people, or one JSON object per line for programs.

Owns the handlers of the root logger, set up once by `daemon.main`; any thread may log. A file of bounded size, whatever
happens: it is rotated, a line is cut at a length, and a warning that repeats is counted instead of written. Prompts and
answers go to one logger, which is silent unless the settings allow it; and of an exception that a request may have
caused, the message, which may quote it, is left out as well.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import stat
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from omlxd.daemon.settings import LogSettings
from omlxd.engine.api import InvariantError

CONTENT = "omlxd.content"  # the one logger that is given prompts and answers; silent unless log.content allows it

_MAX_LINE = 8000  # characters of one record, traceback included
_REPEATS = 5  # of one warning in a window are written
_WINDOW_S = 60.0
# Who handles requests, in its exceptions' messages too; asyncio reports those that nobody caught.
_OF_REQUESTS = ("omlxd.rpc", "omlxd.engine", "omlxd.daemon.generations", "asyncio")
_QUOTING_NOTHING = (OSError, InvariantError)
_NEVER = logging.CRITICAL + 1
_MAX_OUTPUT_BYTES = 1 << 20  # of what a supervisor catches before the log is open
_MAX_KINDS = 256  # warnings told apart; beyond that all are written


class Lines(logging.Formatter):
    """`2026-11-29 22:04:17 INFO daemon: text`, in local time; a traceback follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return _cut(super().format(discreet(record)))


class JsonLines(logging.Formatter):
    """One object per record: `at` (Unix seconds), `level`, `logger`, `message` and, after a failure, `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        shown = discreet(record)
        if shown.exc_info:
            line["traceback"] = _cut(shown.exc_text or self.formatException(shown.exc_info))
        return json.dumps(line, ensure_ascii=False)


def discreet(record: logging.LogRecord) -> logging.LogRecord:
    """The record, with its traceback told without messages where those may quote a request and nobody allowed that."""
    error = record.exc_info[1] if record.exc_info else None
    if (
        error is None
        or not record.name.startswith(_OF_REQUESTS)
        or logging.getLogger(CONTENT).isEnabledFor(logging.INFO)
    ):
        return record
    told = logging.makeLogRecord(record.__dict__)
    told.exc_text = "\n".join(_told(error))
    return told


def _told(error: BaseException) -> Iterator[str]:
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None:
        yield from _told(earlier)
        yield "which led to:"
    yield "Traceback (most recent call last):"
    yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
    message = str(error) if isinstance(error, _QUOTING_NOTHING) else "(its message is left out; log.content shows it)"
    yield f"{type(error).__qualname__}: {message}"


@dataclass(slots=True)
class _Run:
    """One warning's minute: when it began, how often it came."""

    since: float
    count: int = 0


class Counted(logging.Handler):
    """Hands records on to `targets`; of a warning that repeats, the first few of each minute and then their number.

    A warning is known by its logger, its level and its text before the arguments are filled in.
    """

    def __init__(self, targets: Sequence[logging.Handler], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._targets = targets
        self._clock = clock
        self._runs: dict[tuple[str, int, str], _Run] = {}

    def emit(self, record: logging.LogRecord) -> None:  # the caller holds this handler's lock
        self._report(until=self._clock() - _WINDOW_S)
        if record.levelno < logging.WARNING or self._is_among_the_first(record):
            self._hand_on(record)

    def close(self) -> None:
        self.acquire()
        try:
            self._report(until=self._clock())
        finally:
            self.release()
        for target in self._targets:
            target.close()
        super().close()

    def _is_among_the_first(self, record: logging.LogRecord) -> bool:
        key = (record.name, record.levelno, str(record.msg))
        if key not in self._runs and len(self._runs) >= _MAX_KINDS:
            return True
        run = self._runs.setdefault(key, _Run(self._clock()))
        run.count += 1
        return run.count <= _REPEATS

    def _report(self, *, until: float) -> None:
        """Ends the minutes that began by `until`, and writes what they held back."""
        for (name, level, text), run in [*self._runs.items()]:
            if run.since > until:
                continue
            del self._runs[name, level, text]
            if run.count > _REPEATS:
                message = f"{run.count - _REPEATS} more like this: {text}"
                self._hand_on(logging.LogRecord(name, level, __file__, 0, message, None, None))

    def _hand_on(self, record: logging.LogRecord) -> None:
        for target in self._targets:
            target.handle(record)


def set_up(path: str, settings: LogSettings, *, as_json: bool, to_stderr: bool) -> None:
    """Sends everything that is logged to the file at `path` (its directory is made, 0700), and to stderr if wanted.

    The omlxd modules log from the settings' level on, libraries from warnings on. Raises OSError where the file cannot
    be opened.
    """
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    targets: list[logging.Handler] = [
        logging.handlers.RotatingFileHandler(
            path, maxBytes=settings.max_bytes, backupCount=settings.keep, encoding="utf-8", errors="backslashreplace"
        )
    ]
    if to_stderr:
        targets.append(logging.StreamHandler())
    for target in targets:
        target.setFormatter(JsonLines() if as_json else Lines())
    logging.basicConfig(handlers=[Counted(targets)], level=logging.WARNING)
    set_level(settings.level)
    set_content(settings.content)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk or a closed terminal must not add to what fails


def set_level(level: str) -> None:
    """What omlxd's own modules log from now on: a level of the settings."""
    logging.getLogger("omlxd").setLevel(level.upper())


def set_content(allowed: bool) -> None:
    """Whether prompts and answers are logged from now on, at whatever level the rest is."""
    logging.getLogger(CONTENT).setLevel(logging.INFO if allowed else _NEVER)


def trim_output(descriptor: int) -> None:
    """Empties the file that a supervisor has put in place of standard error, once it has grown.

    Nobody rotates that file, and it is held open for the job's life; opened for appending, it can be cut at any time.
    """
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode) and state.st_size > _MAX_OUTPUT_BYTES:
        os.ftruncate(descriptor, 0)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]} ... ({len(text) - _MAX_LINE} characters more)"
