"""What can go wrong in the cache room. A miss is no error; these are said once, when a model is opened, or are bugs."""

from __future__ import annotations


class CacheError(Exception):
    """The root of this room's errors."""


class UnsupportedLayout(CacheError):
    """A model keeps state in a class that nobody has taught us to cut. The model runs, without a prefix cache."""

    def __init__(self, class_name: str) -> None:
        super().__init__(f"no cache layout is known for {class_name}; the model runs without a prefix cache")
        self.class_name = class_name


class UnreadableModel(CacheError):
    """A model directory's files do not allow an identity; `path` is the one that does not."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}; without an identity nothing of this model may be cached")
        self.path = path
        self.reason = reason


class CacheInvariantError(CacheError):
    """Our own bookkeeping is broken. Always loud, never a miss."""
