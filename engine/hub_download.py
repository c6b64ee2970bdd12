"""The process that downloads a Hugging Face repository: `python -m omlxd.engine.hub_download REPO FOLDER`.

Started by `engine/pull_network.py` and by nothing else: a download that is given up is killed at once whatever library
carries it. The files that are whole by then stay in the folder and are not fetched again; huggingface_hub 2.4 keeps no
half of a file from one process to the next (within one it goes on after a lost connection). Says on stdout, one JSON
object a line, how far it is (`done`, `total` bytes) and last how it ended: `ok`, `missing` or `storage`.
"""

from __future__ import annotations

import json
import sys
import threading
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from omlxd.engine.model_folder import WEIGHTS

# What a model needs to run; other formats of the same weights would multiply the download.
WANTED = (WEIGHTS, "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.jsonl", "*.py")

_speaking = threading.Lock()


class ByteBar(tqdm):
    """A progress bar that speaks in JSON lines. Of the library's bars only those that count bytes say anything."""

    total_bytes = 0
    kept_bytes = 0  # of files that an earlier try has fetched
    said_bytes = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._counts_bytes = kwargs.get("unit") == "B"
        self._done = 0
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

    def update(self, n: float | None = 1) -> bool | None:
        if self._counts_bytes:
            self._count(int(n or 0))
        shown: bool | None = super().update(n)
        return shown

    def _count(self, num_bytes: int) -> None:
        """Called by every download thread. Two bars count, what came and what is written: the one ahead is said."""
        with _speaking:
            self._done += num_bytes
            if self._done > ByteBar.said_bytes:
                ByteBar.said_bytes = self._done
                _say(done=min(self.kept_bytes + self._done, self.total_bytes), total=self.total_bytes)


def download(repo: str, folder: Path) -> None:
    """Raises what huggingface_hub raises."""
    info = HfApi().model_info(repo, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or [] if _is_wanted(file.rfilename)}
    ByteBar.total_bytes = sum(sizes.values())
    ByteBar.kept_bytes = sum(size for name, size in sizes.items() if (folder / name).exists())
    _say(done=ByteBar.kept_bytes, total=ByteBar.total_bytes)
    # By its commit: of a branch the client would leave a note in the user's cache, where it looks like a broken model.
    snapshot_download(repo, revision=info.sha, local_dir=folder, allow_patterns=list(WANTED), tqdm_class=ByteBar)
    _say(done=ByteBar.total_bytes, total=ByteBar.total_bytes)


def _is_wanted(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in WANTED)


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def main(repo: str, folder: str) -> None:
    try:
        download(repo, Path(folder))
    except GatedRepoError:
        _say(missing="its owner asks for consent first: accept the terms on its page and log in with `hf auth login`")
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
        _say(missing="the Hub has no such repository, or it is private and you are not logged in")
    except OSError as error:
        _say(storage=" ".join((error.strerror or str(error)).split())[:300], errno=error.errno)
    else:
        _say(ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
