"""Fixtures of the launchd room's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchd.libsystem import compiled


@pytest.fixture(scope="session")
def libsystem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("libsystem"))
