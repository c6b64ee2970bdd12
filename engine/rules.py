"""Rules: what may come next in one answer, and which rules hold after that.

Each is advanced token by token by its row's steering, on the engine thread. A rule that has run its course names its
successors; the steering knows when rules hold, these know only tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from omlxd.engine.grammar import Grammar, Mask, Matching


class Rule(Protocol):
    """What holds for the next tokens."""

    def allowed(self) -> Mask | frozenset[int]:
        """The tokens that may come next, as a mask or by their ids."""
        ...

    def take(self, token_id: int) -> Sequence[Rule] | None:
        """The token came next. Returns the rules that hold from now on, None for: this one still."""
        ...


class Forced:
    """These tokens, one after the other."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._left = deque(token_ids)

    def allowed(self) -> frozenset[int]:
        return frozenset({self._left[0]})

    def take(self, token_id: int) -> list[Rule] | None:
        self._left.popleft()
        return None if self._left else []


class Choice:
    """One of several sequences of tokens, each with what holds after it."""

    def __init__(self, ways: Sequence[tuple[Sequence[int], Sequence[Rule]]]) -> None:
        self._ways = list(ways)
        self._taken = 0

    def allowed(self) -> frozenset[int]:
        return frozenset(token_ids[self._taken] for token_ids, _ in self._ways)

    def take(self, token_id: int) -> list[Rule] | None:
        self._ways = [way for way in self._ways if way[0][self._taken] == token_id]
        self._taken += 1
        for token_ids, after in self._ways:
            if len(token_ids) == self._taken:
                return list(after)
        return None


class Follow:
    """A text of the grammar: the whole of what is left to say, or, with `then`, something that other rules follow."""

    def __init__(self, grammar: Grammar, then: Sequence[Rule] | None = None) -> None:
        self.matching = Matching(grammar)
        self._then = then

    def allowed(self) -> Mask:
        return self.matching.allowed()

    def take(self, token_id: int) -> list[Rule] | None:
        self.matching.take(token_id)
        if self._then is None or self.matching.failure or not self.matching.complete:
            return None
        return list(self._then)


class Unless:
    """A grammar, unless the first token begins one of the `ways`. One that may begin a text of the grammar does."""

    def __init__(self, follow: Follow, ways: Sequence[tuple[Sequence[int], Sequence[Rule]]]) -> None:
        self.follow = follow
        self._ways = list(ways)

    def allowed(self) -> Mask:
        mask = self.follow.allowed().copy()
        mask[[token_ids[0] for token_ids, _ in self._ways]] = True
        return mask

    def take(self, token_id: int) -> list[Rule] | None:
        of_grammar = self.follow.allowed()[token_id]
        for token_ids, after in self._ways:
            if token_ids[0] == token_id and not of_grammar:
                return [*([Forced(token_ids[1:])] if len(token_ids) > 1 else []), *after]
        self.follow.take(token_id)
        return [self.follow]
