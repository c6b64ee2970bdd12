"""docs/python.md, run: each snippet as it stands there, in a process of its own, against the real server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from omlxd.engine.api import Progress
from tests.fakes import FakeBackend, answering, entry, last_words, serving_in_thread
from tests.snippets import snippets

MODEL: Final = "SmolLM2-135M-Instruct"
SNIPPETS: Final = snippets("python.md")
SAYS: Final = {
    "chat": "What is the capital of France?",
    "result": "Once upon a time stop 4\n",
    "cancel": "{'kind': 'progress', 'phase': 'prefill', 'done': 1, 'total': 3}\nTell\nstop\n",
    "rest": f"{MODEL} READY 0\n16\n1\n",
    "errors": f"model_not_found ['{MODEL}']\n",
    "again": "What is the capital of France?\n",
    "asyncio": "stop\n",
    "types": "What is the capital of France?\n",
}


@pytest.fixture
def env(path: Path) -> Iterator[dict[str, str]]:
    backend = FakeBackend(models={MODEL: entry(MODEL)})
    backend.script = lambda request: answering(last_words(request), progress=[Progress("prefill", 1, 3)])
    with serving_in_thread(backend, path):
        yield {**os.environ, "OMLXD_SOCKET": str(path)}


@pytest.mark.parametrize("name", SAYS)
def test_a_snippet_says_what_it_should(name: str, env: dict[str, str], tmp_path: Path) -> None:
    program = [sys.executable, "-W", "error", "-c", SNIPPETS[name]]
    done = subprocess.run(program, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.endswith(SAYS[name])


def test_every_snippet_is_run() -> None:
    assert list(SNIPPETS) == list(SAYS)


def test_the_snippets_pass_the_type_checker(tmp_path: Path) -> None:
    files = []
    for name, code in SNIPPETS.items():
        files.append(tmp_path / f"{name}_.py")
        files[-1].write_text(code)
    root = Path(__file__).resolve().parents[2]
    check = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(root / "pyproject.toml"), *map(str, files)]
    done = subprocess.run(check, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
