"""Fixtures of the command line's tests."""

from collections.abc import Iterator

import pytest

from tests.cli.running import Home, temporary_home
from tests.cli.serving import Daemon, serving


@pytest.fixture
def home() -> Iterator[Home]:
    yield from temporary_home()


@pytest.fixture
def daemon(home: Home) -> Iterator[Daemon]:
    with serving(home) as daemon:
        yield daemon
