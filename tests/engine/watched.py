"""A tiny llama that records the shape of every forward pass, and can be slowed down or made to fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from tests.models import build


class Watched(nn.Module):
    """`calls` holds (rows, tokens) of each pass; `before` is run ahead of one and may raise or wait."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = build("llama") if inner is None else inner
        self.calls: list[tuple[int, int]] = []
        self.before: Callable[[mx.array], None] = lambda tokens: None

    @property
    def layers(self) -> Any:
        return self.inner.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        self.before(tokens)
        self.calls.append((tokens.shape[0], tokens.shape[1]))
        return self.inner(tokens, cache=cache)

    def slow(self, seconds: float) -> None:
        """Every pass takes this much longer from now on."""
        self.before = lambda tokens: time.sleep(seconds)
