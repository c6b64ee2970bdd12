"""Fixtures of the command line's tests."""

from collections.abc import Iterator

import pytest

from tests.cli.running import Home, temporary_home


@pytest.fixture
def home() -> Iterator[Home]:
    yield from temporary_home()
