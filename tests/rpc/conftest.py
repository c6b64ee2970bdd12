"""What every wire test has: asyncio, a fake backend, a socket path."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import FakeBackend


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def path() -> Iterator[Path]:
    """Not in tmp_path, which can be longer than a socket's path may be."""
    with tempfile.TemporaryDirectory(prefix="omlxd-") as directory:
        yield Path(directory) / "s"
