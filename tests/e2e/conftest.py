from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.living import Daemon, daemon_in_new_home
from tests.models import write, write_scripted


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon that runs, with two tiny models: a llama, and one that always answers with the same words."""
    with daemon_in_new_home() as living:
        write("llama", living.models / "tiny", eos=[])
        write_scripted(living.models / "parrot", ["Hello", " there", ", ", "\U0001f44b", " friend", "."])
        living.start()
        yield living
