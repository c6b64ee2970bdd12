"""Importing a GGUF file as an MLX model folder, in a process of its own.

Called on a worker thread by `engine/pull.py`; imports no mlx. What works: the llama family with F32, F16, Q4_0, Q4_1
and Q8_0 tensors, whose quantisation is kept, and byte-level BPE tokenizers. Anything else is refused by name.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

from omlxd.engine.api import ModelLoadFailed, OmlxError, Progress, ProgressSink, StorageFailed, Unsupported
from omlxd.engine.child import PYTHON, Ended, run_child

_HINT = "get the file again, or the model in MLX format"


def import_gguf(source: Path, folder: Path, *, progress: ProgressSink, check: Callable[[], None]) -> None:
    """Fills an empty folder with the model of a GGUF file. The folder's content is worthless after a failure.

    `check` is called ten times a second and raises to give up. Raises ModelLoadFailed, Unsupported or StorageFailed.
    """
    verdict: dict[str, object] = {}

    def heard(line: str) -> None:
        said = json.loads(line)
        if "total" in said:
            progress(Progress("download", said["done"], said["total"], "import"))
        else:
            verdict.update(said)

    command = [*PYTHON, "-m", "omlxd.engine.gguf_convert", str(source), str(folder)]
    ended = run_child(command, heard=heard, check=check)
    if error := _failure(source, verdict, ended):
        raise error


def _failure(source: Path, verdict: dict[str, object], ended: Ended) -> OmlxError | None:
    match verdict:
        case {"ok": True}:
            return None
        case {"bad": str(reason)}:
            return ModelLoadFailed(str(source), f"not a usable GGUF file: {reason}", _HINT)
        case {"unsupported": [str(what), str(reason)]}:
            return Unsupported(what, reason)
        case {"storage": [str(path), str(reason)]}:
            return StorageFailed(path, reason)
    return ModelLoadFailed(str(source), f"the GGUF converter {_death(ended)}", _HINT)


def _death(ended: Ended) -> str:
    if ended.status < 0:
        return f"was killed by {signal.Signals(-ended.status).name}"
    last = ended.complaint.splitlines()[-1:] or ["it said nothing"]
    return f"stopped with status {ended.status}: {last[0]}"
