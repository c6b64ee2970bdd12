"""From catalog entries to engines, for real: the pool's `ModelBackend` over mlx.

`load` is the only place that brings mlx into the process, on the loader thread; the event loop then finds it imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omlxd.engine.api import LoadOptions, ProgressSink
from omlxd.engine.catalog import CatalogEntry
from omlxd.engine.model import LoadedModel
from omlxd.engine.scheduler import SchedulerLimits

if TYPE_CHECKING:
    from omlxd.engine.engine import Engine


class MlxBackend:
    """Loads with mlx-lm and starts an engine thread per model."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits

    def load(self, entry: CatalogEntry, options: LoadOptions, progress: ProgressSink) -> LoadedModel:
        # Imported here, not above: it takes seconds, and a daemon without a model must start in a blink.
        from omlxd.engine import engine, loader  # noqa: F401

        return loader.load(entry, options, progress=progress)

    def start(self, loaded: LoadedModel) -> Engine:
        from omlxd.engine.engine import Engine

        return Engine(loaded, self._limits)
