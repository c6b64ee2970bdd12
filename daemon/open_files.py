"""How many files the process may have open: every client is one, and so is every shard of a model while it is read.

Stateless. Called once by `daemon.main`, before the socket exists.
"""

from __future__ import annotations

import resource
from typing import Final

WANTED: Final = 4096


def allow_many() -> None:
    """Raises the soft limit to WANTED, or as far as the hard one goes; launchd and macOS begin with 256.

    mlx-lm sets it to 2048 when a model is first loaded, which is as good.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
