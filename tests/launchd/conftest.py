"""Fixtures of the launchd room's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiled import library


@pytest.fixture(scope="session")
def libsystem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libSystem with launch_activate_socket."""
    return library(Path(__file__).with_name("fake_libsystem.c"), tmp_path_factory.mktemp("libsystem"))
