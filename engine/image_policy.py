"""What pictures are taken: where from, how large, how many. And how one is refused.

Values only; light to import, because a daemon makes its policy before it needs Pillow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MB = 1 << 20


class PictureError(Exception):
    """What a message names cannot be used as a picture. The reason reads on after the picture's place."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ImagePolicy:
    """Where pictures may come from and how large they may be.

    `allow_paths` are absolute folders; `max_bytes` bounds a picture as it comes, `max_pixels` one decoded picture, and
    the other two a whole conversation, which is decoded at once.
    """

    allow_paths: Sequence[str] = ()
    allow_urls: bool = False
    max_pixels: int = 40_000_000
    max_bytes: int = 64 * MB
    max_pictures: int = 64

    @property
    def max_total_pixels(self) -> int:
        return 4 * self.max_pixels
