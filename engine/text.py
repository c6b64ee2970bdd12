"""Text: token ids become characters, and stop strings end an answer.

`Detokenizer` turns one row's tokens into text piece by piece, whole characters only; `StopFinder` watches that text.
Both belong to one request and run on its engine thread. Joined, the pieces are exactly the tokenizer's decoding of
all the ids, whatever its spacing rules. `Finder` is the search that stop strings and channel markers share.
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


class Finder:
    """Finds the first of several strings in a growing text, and what of its end may still become one of them.

    The occurrence that ends first wins, and of those that end together the longest, so that the outcome does not
    depend on how the text was cut into pieces. Holds no text: one finder serves any number of requests.
    """

    __slots__ = ("_firsts", "_strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._firsts = frozenset(string[0] for string in strings)

    def split(self, text: str) -> tuple[str, str | None, str]:
        """The text before, the string that was found, the text after it.

        With none found: the text that is certainly no part of one, None, and the end that may be.
        """
        if self._firsts.isdisjoint(text):
            return text, None, ""
        found = [(at + len(s), at, s) for s in self._strings if (at := text.find(s)) >= 0]
        if found:
            end, at, string = min(found)
            return text[:at], string, text[end:]
        cut = len(text) - self._possible_start(text)
        return text[:cut], None, text[cut:]

    def _possible_start(self, text: str) -> int:
        """How many of the last characters are the beginning of a string, at the most."""
        longest = 0
        for string in self._strings:
            for size in range(min(len(string) - 1, len(text)), longest, -1):
                if text.endswith(string[:size]):
                    longest = size
                    break
        return longest


class StopFinder:
    """Finds the stop string that ends a text and holds back only what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._finder = Finder(stops)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Text that is certainly part of the answer, and whether a stop string ended it."""
        before, stop, rest = self._finder.split(self._held + text)
        self._held = "" if stop is not None else rest
        return before, stop is not None

    def finish(self) -> str:
        """The held-back text, once no more is coming."""
        held, self._held = self._held, ""
        return held
