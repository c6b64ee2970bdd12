"""What a check of `omlxctl doctor` found. A value."""

from __future__ import annotations


class Finding:
    """What one check found: `level` is ok, warn or fail; `advice` says what to do, for the latter two."""

    __slots__ = ("advice", "check", "level", "message")

    def __init__(self, level: str, check: str, message: str, advice: str = "") -> None:
        self.level, self.check, self.message, self.advice = level, check, message, advice

    def as_dict(self) -> dict[str, str]:
        return {"check": self.check, "level": self.level, "message": self.message, "advice": self.advice}
