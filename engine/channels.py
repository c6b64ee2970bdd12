"""Channels: which part of an answer is content, which is reasoning, which is a tool call.

A `Dialect` says how a model marks them, as states and the marker texts that lead from one to the next; a `Separator`
reads one answer by it. Knows characters and markers, no tokens and no models. Lives with its request, on the engine
thread. Markers belong to no channel and are never handed on; neither is the text of other control tokens.

White space at a channel's edge belongs to the marker beside it: reasoning comes without any at its ends, and the line
breaks right after the mark that ends reasoning or a tool call are no part of the content.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from omlxd.engine.text import Finder


class State(enum.StrEnum):  # not a plain enum: its hash is a function in Python, and every token looks up a few
    """Where in an answer the text is. HEADER is a message's head, whose text is nobody's."""

    CONTENT = "content"
    REASONING = "reasoning"
    TOOL = "tool"
    HEADER = "header"


_CLOSED = frozenset({State.REASONING, State.TOOL})
BLANKS = " \t\r\n"
_BREAKS = "\r\n"


class Exits:
    """The markers that end one state, each with the state that follows; `blanks` before one belong to it."""

    __slots__ = ("blanks", "finder", "targets")

    def __init__(self, targets: Mapping[str, State], *, blanks: str = "") -> None:
        self.targets = dict(targets)
        self.finder = Finder(list(targets))
        self.blanks = blanks


def exits_of(edges: Mapping[State, Mapping[str, State]]) -> dict[State, Exits]:
    """The exits of each state that has any."""
    return {
        state: Exits(targets, blanks=BLANKS if state is State.REASONING else "")
        for state, targets in edges.items()
        if targets
    }


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model's answers are marked: the markers that lead out of each state."""

    exits: Mapping[State, Exits] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one state; `marker` is what ended it and led to `target`, None while it goes on.

    `raw` is a tool call's text with its control tokens, which its parser reads and nobody else.
    """

    state: State
    text: str
    raw: str = ""
    marker: str | None = None
    target: State | None = None


class Separator:
    """Reads one answer. Text goes in as it is decoded and comes out as soon as it can be no part of a marker."""

    def __init__(
        self, dialect: Dialect, state: State, quoted: Callable[[str], bool] | None = None, *, begun: bool = False
    ) -> None:
        """`begun` says that the state's text has begun already: white space is part of it.

        `quoted` says of a tool call's text so far that it ends in a string: a closing mark is just text there.
        """
        self.state = state
        self._exits = dialect.exits
        self._quoted = quoted
        self._held = ""
        self._control: list[tuple[int, int]] = []  # the parts of the held text that control tokens stand for
        self._drop = BLANKS if state is State.REASONING and not begun else ""  # what the next text may not begin with
        self._silent = not begun  # the state has had no text yet
        self._call: list[str] = []

    def add(self, text: str, *, control: bool = False) -> list[Piece]:
        """Takes more text; `control` says that a control token stands for it."""
        if not text:
            return []
        if control:
            self._control.append((len(self._held), len(self._held) + len(text)))
        self._held += text
        if self.state not in self._exits:
            piece = self._piece(len(self._held))
            return [piece] if piece.text or piece.raw else []
        pieces: list[Piece] = []
        more = True
        while more:
            piece, more = self._next()
            if piece.text or piece.raw or piece.marker:
                pieces.append(piece)
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back, once no more is coming."""
        exits = self._exits.get(self.state)
        piece = self._piece(len(self._held if exits is None else self._held.rstrip(exits.blanks)))
        return [piece] if piece.text or piece.raw else []

    def _next(self) -> tuple[Piece, bool]:
        """The next piece, and whether there may be another."""
        exits = self._exits.get(self.state)
        if exits is None:
            return self._piece(len(self._held)), False
        before, marker, _ = exits.finder.split(self._held)
        if marker is None:
            return self._piece(self._certain(before, exits)), False
        stop = len(before) + len(marker)
        if self._in_string(before):
            return self._piece(stop), True
        text = before.rstrip(BLANKS if self._is_lead(before) else exits.blanks)
        piece = self._piece(len(text), marker, exits.targets[marker])
        self._skip(stop - len(text))
        self._enter(exits.targets[marker])
        return piece, True

    def _certain(self, before: str, exits: Exits) -> int:
        """How much of it is no part of a marker that may follow, nor blanks that belong to one."""
        return 0 if self._is_lead(before) else len(before.rstrip(exits.blanks))

    def _is_lead(self, before: str) -> bool:
        """Whether the state would begin with blanks alone: a marker after them would make them part of it."""
        return self._silent and self.state is State.CONTENT and not before.strip(BLANKS)

    def _in_string(self, before: str) -> bool:
        if self.state is not State.TOOL or self._quoted is None:
            return False
        return self._quoted("".join([*self._call, before]))

    def _enter(self, target: State) -> None:
        if target is not self.state:
            self._drop = ""
            self._silent = True
            if target is State.REASONING:
                self._drop = BLANKS
            elif target is State.CONTENT and self.state in _CLOSED:
                self._drop = _BREAKS
        self.state = target
        self._call.clear()

    def _piece(self, size: int, marker: str | None = None, target: State | None = None) -> Piece:
        """Takes the first `size` characters, as the state's text."""
        raw = self._held[:size]
        text = self._without_control(raw) if self._control else raw
        self._skip(size)
        if self._drop:
            text = text.lstrip(self._drop)
            self._drop = "" if text else self._drop
        if text:
            self._silent = False
        if self.state is State.TOOL:
            self._call.append(raw)
            return Piece(self.state, text, raw, marker, target)
        return Piece(self.state, "" if self.state is State.HEADER else text, "", marker, target)

    def _without_control(self, taken: str) -> str:
        for start, stop in reversed(self._control):
            taken = taken[:start] + taken[stop:]
        return taken

    def _skip(self, size: int) -> None:
        self._held = self._held[size:]
        if self._control:
            self._control = [(max(start - size, 0), stop - size) for start, stop in self._control if stop > size]
