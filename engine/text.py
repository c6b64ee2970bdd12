"""Text: token ids become characters, and stop strings end an answer.

`Detokenizer` turns one row's tokens into text piece by piece, whole characters only; `StopFinder` watches that text.
Both belong to one request and run on its engine thread. Joined, the pieces are exactly the tokenizer's decoding of
all the ids, whatever its spacing rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# An unfinished character is at most this many byte tokens; after that, bytes that never become one are let through.
MAX_HELD_TOKENS = 16


class Decoder(Protocol):
    """What is needed of a tokenizer: Hugging Face's `decode`."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class Detokenizer:
    """Tokens in, finished text out.

    Decodes a short window twice per token, with and without the new tokens, and takes the difference: a tokenizer's
    rules for leading spaces and joined bytes then apply as they do to the whole, at a cost that does not grow.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []  # the tokens last turned into text, as context, then those still held back
        self._context = 0  # how many of the window are context
        self._context_text = ""

    def add(self, token_id: int) -> str:
        """The text that became final with this token; empty while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        held = len(self._window) - self._context
        if text.endswith(REPLACEMENT) and held < MAX_HELD_TOKENS:
            return ""
        return self._take(text)

    def finish(self) -> str:
        """What is still held back: an incomplete character, as the tokenizer shows it."""
        return self._take(self._decode(self._window)) if len(self._window) > self._context else ""

    def _take(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._context_text = self._decode(self._window)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=False)


class StopFinder:
    """Finds the first stop string in a growing text and holds back only what may still become one.

    The occurrence that ends first wins, and of those that end together the longest, so that the outcome does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Text that is certainly part of the answer, and whether a stop string ended it."""
        text = self._held + text
        start = self._find(text)
        if start is not None:
            self._held = ""
            return text[:start], True
        cut = len(text) - self._possible_start(text)
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """The held-back text, once no more is coming."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _possible_start(self, text: str) -> int:
        """How many of the last characters are the beginning of a stop string, at the most."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
