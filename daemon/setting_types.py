"""What a settings key may hold: how its value is read from TOML and from text, and in which range.

Values without state, used by `daemon.settings` alone. Every parser raises ValueError with a sentence that says what the
key takes; the caller adds the key's name and the offending value.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

KB, MB, GB = 1024, 1024**2, 1024**3
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": KB, "m": MB, "g": GB, "t": 1024**4}

Value = bool | int | float | str | tuple[str, ...] | None


class Kind(Protocol):
    """One type of value: `parse` takes what TOML holds, `read` turns text into what TOML would hold."""

    def parse(self, raw: object) -> Value: ...

    def read(self, text: str) -> object: ...


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false."""

    def parse(self, raw: object) -> Value:
        if not isinstance(raw, bool):
            raise ValueError("takes true or false")
        return raw

    def read(self, text: str) -> object:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower(), text)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from `low` to `high`, both included."""

    low: int
    high: int

    def parse(self, raw: object) -> Value:
        if isinstance(raw, bool) or not isinstance(raw, int) or not self.low <= raw <= self.high:
            raise ValueError(f"takes a whole number from {self.low} to {self.high}")
        return raw

    def read(self, text: str) -> object:
        return int(text) if re.fullmatch(r"\s*[+-]?\d{1,30}\s*", text) else text


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds or milliseconds, fractions allowed, from `low`; never infinite."""

    low: float

    def parse(self, raw: object) -> Value:
        if isinstance(raw, bool) or not isinstance(raw, int | float) or not math.isfinite(raw) or raw < self.low:
            raise ValueError(f"takes a number of {self.low:g} or more")
        return float(raw)

    def read(self, text: str) -> object:
        try:
            return float(text)
        except ValueError:
            return text


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes: a whole number, or a string with a unit. `word` is a string that stands for None ("auto")."""

    low: int = 0
    word: str | None = None

    def parse(self, raw: object) -> Value:
        if self.word is not None and raw == self.word:
            return None
        num_bytes = self._bytes(raw)
        if num_bytes is None or num_bytes < self.low:
            word = f', or "{self.word}"' if self.word else ""
            raise ValueError(
                f'takes bytes or a size such as "20GB" (K, M, G and T are powers of 1024), at least {self.low}{word}'
            )
        return num_bytes

    def read(self, text: str) -> object:
        return int(text) if re.fullmatch(r"\d{1,30}", text.strip()) else text

    @staticmethod
    def _bytes(raw: object) -> int | None:
        if isinstance(raw, int) and not isinstance(raw, bool):
            return raw
        match = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
        return round(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else None


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: Sequence[str]

    def parse(self, raw: object) -> Value:
        if not isinstance(raw, str) or raw not in self.words:
            raise ValueError("takes one of " + ", ".join(f'"{word}"' for word in self.words))
        return raw

    def read(self, text: str) -> object:
        return text


@dataclass(frozen=True, slots=True)
class Text:
    """Any text that is not empty."""

    def parse(self, raw: object) -> Value:
        if not isinstance(raw, str) or not raw.strip():
            raise ValueError("takes a text that is not empty")
        return raw

    def read(self, text: str) -> object:
        return text


@dataclass(frozen=True, slots=True)
class Directory:
    """An absolute path, or one that begins with `~/`: a daemon's working directory says nothing to its user."""

    def parse(self, raw: object) -> Value:
        if not isinstance(raw, str) or not os.path.isabs(os.path.expanduser(raw)) or "\0" in raw:
            raise ValueError("takes an absolute path, or one that begins with ~/")
        return os.path.normpath(os.path.expanduser(raw))

    def read(self, text: str) -> object:
        return text


@dataclass(frozen=True, slots=True)
class Directories:
    """A list of paths; as text, a TOML array or paths with colons between them."""

    def parse(self, raw: object) -> Value:
        if not isinstance(raw, list):
            raise ValueError("takes a list of absolute paths")
        return tuple(str(Directory().parse(item)) for item in raw)

    def read(self, text: str) -> object:
        if not text.lstrip().startswith("["):
            return [part for part in text.split(os.pathsep) if part]
        try:
            return tomllib.loads(f"paths = {text}")["paths"]
        except tomllib.TOMLDecodeError:
            return text
