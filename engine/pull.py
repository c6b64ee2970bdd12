"""Pulling: from a source's name to a model folder below `models_dir`, whole or not at all.

Called on a worker thread; one pull of a name at a time, in any process, kept by a lock on its staging folder. A model
is made in `.pull/NAME/` beside its place, examined, flushed to disk and renamed there, so no reader ever sees half of
one. A note in the folder says where it came from: pulling the same again finds it there, and something else of that
name is not overwritten. Imports no mlx.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from omlxd.engine.api import InvalidParams, ProgressSink, StorageFailed
from omlxd.engine.model_folder import examine
from omlxd.engine.pull_job import Job
from omlxd.engine.pull_sources import Source, Transports, check_model, source_of

STAGING = ".pull"
_REAL = Transports()
NOTE = ".omlxd.json"
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*(/[A-Za-z0-9][\w.+-]*)?")


def pull(
    source: str,
    name: str | None,
    *,
    models_dir: Path,
    progress: ProgressSink,
    cancelled: Callable[[], bool] = lambda: False,
    transports: Transports = _REAL,
) -> Path:
    """Makes the model of `source` present as `models_dir/NAME` and returns that folder.

    `source` is `demo`, a Hugging Face repository id, a `.gguf` file or a model folder (absolute paths). `cancelled` is
    asked about ten times a second. Raises ModelNotFound, ModelLoadFailed, Unsupported, StorageFailed, InvalidParams or
    Cancelled; a Hugging Face download that ended early goes on where it was.
    """
    job = Job(progress, cancelled)
    job.check()
    origin = source_of(source, transports)
    target = models_dir / _checked(name or origin.name)
    with _storage_errors(target):
        if _is_there(target, origin):
            size = examine(target, allow_remote_code=True).size_bytes
            job.at(size, size, f"already there: {target}")
            return target
        with _staging(models_dir, target) as staging:
            _make(origin, staging, target, job)
    return target


def pulled_from(folder: Path) -> str | None:
    """Where a model folder was pulled from; None for one that was not pulled."""
    try:
        note = json.loads((folder / NOTE).read_bytes())
    except (OSError, ValueError):
        return None
    match note:
        case {"origin": str(origin)}:
            return origin
    return None


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or any(part in (".", "..") for part in name.split("/")):
        raise InvalidParams("name", f"{name!r} is no model name: letters, digits and . _ + - with at most one /")
    return name


def _is_there(target: Path, source: Source) -> bool:
    """Whether this very source has been pulled and is usable. Raises StorageFailed if the place is another's."""
    if not target.exists():
        return False
    origin = pulled_from(target)
    if origin != source.origin:
        was = f"pulled from {origin!r}" if origin else "not pulled by omlxd"
        raise StorageFailed(str(target), f"it exists already and was {was}; give another name or remove it first")
    return examine(target, allow_remote_code=True).defect is None


@contextmanager
def _staging(models_dir: Path, target: Path) -> Iterator[Path]:
    staging = models_dir / STAGING / str(target.relative_to(models_dir)).replace("/", "--")
    staging.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StorageFailed(str(target), "it is being pulled already; wait for that to end") from None
    else:
        yield staging
    finally:
        os.close(descriptor)


def _make(source: Source, staging: Path, target: Path, job: Job) -> None:
    folder, work = staging / "model", staging / "work"
    keep = source.resumes
    try:
        _prepare(folder, work, resume=source.resumes)
        source.fetch(folder, work, job)
        keep = False
        check_model(folder, target.name)
        (folder / NOTE).write_text(json.dumps({"origin": source.origin}), encoding="utf-8")
        job.check()
        _flush(folder)
        _put(folder, target, aside=staging / "old")
    finally:
        if not (keep and folder.is_dir() and any(folder.iterdir())):
            shutil.rmtree(staging, ignore_errors=True)


def _prepare(folder: Path, work: Path, *, resume: bool) -> None:
    shutil.rmtree(work, ignore_errors=True)
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    work.mkdir()
    folder.mkdir(exist_ok=True)


def _flush(folder: Path) -> None:
    """A rename may reach the disk before the data of what is renamed; after a power cut that would be empty files."""
    for path in [*folder.iterdir(), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put(folder: Path, target: Path, *, aside: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():  # a damaged one of the same origin
        target.rename(aside)
    folder.rename(target)
    _sync(target.parent)


@contextmanager
def _storage_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageFailed(str(error.filename or target), _explained(error, target)) from error


def _explained(error: OSError, target: Path) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error.strerror or str(error)
    existing = next(path for path in target.parents if path.exists())
    return f"the disk is full: {shutil.disk_usage(existing).free} bytes are free; free some space and pull again"
