"""Grammars: what a client holds an answer to, compiled by llguidance, and which tokens may come next.

`Grammars` belongs to one model and compiles on its tokenizer thread, so that what is wrong or too large is refused
before any generation. A `Grammar` is a value that any number of requests may start a `Matching` from; that lives with
its row, on the engine thread. Only this file knows llguidance.

White space is bounded: between the parts of a JSON text stand at most MAX_BLANKS characters of it, and after
MAX_BLANK_RUN blanks in a row a string is ended, where the schema lets it. Left alone, a model that has fallen into
writing blanks writes nothing else until the limit.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from omlxd.engine.api import InvalidGrammar, Json, Unsupported
from omlxd.engine.model import ModelFacts

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

MAX_GRAMMAR_CHARS = 128 * 1024
MAX_BLANKS = 20
MAX_BLANK_RUN = 64
_REASON_CHARS = 400
_BLANK_PATTERN = rf"[ \t\r\n]{{0,{MAX_BLANKS}}}"

Mask = NDArray[np.bool_]


class Vocabulary:
    """A model's tokens as llguidance sees them; `size` is the width of the logits, `ends` the model's end tokens.

    `blanks` are the tokens that begin with white space, `quotes` those that begin with the end of a JSON string.
    """

    def __init__(self, tokenizer: LLTokenizer, size: int, ends: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self.ends: Mask = np.zeros(size, dtype=np.bool_)
        self.ends[list(ends)] = True
        first = [self.text(id)[:1] for id in range(size)]  # now: on the engine thread the other rows would wait for it
        self.blanks: Mask = np.array([byte.isspace() for byte in first])
        self.quotes: Mask = np.array([byte == b'"' for byte in first])

    def text(self, token_id: int) -> bytes:
        return self.tokenizer.decode_bytes([token_id])


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar. `bounded` bounds its blanks."""

    vocabulary: Vocabulary
    start: LLMatcher  # never advanced: every matching is a copy of it
    bounded: bool = False


class Matching:
    """One answer's way through a grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._vocabulary = grammar.vocabulary
        self._matcher = grammar.start.deep_copy()
        self._bounded = grammar.bounded
        self._blank_run = 0

    @property
    def complete(self) -> bool:
        """Whether the text is finished and nothing may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def failure(self) -> str | None:
        """Why no mask can be computed any more, if so: the grammar became too complex for the text."""
        return _short(self._matcher.get_error()) if self._matcher.is_error() else None

    def take_text(self, text: str) -> None:
        """The text came next, in a token that began before it."""
        self._matcher.consume_tokens(self._vocabulary.tokenizer.tokenize_str(text))

    def take(self, token_id: int) -> None:
        """The token came next."""
        self._matcher.consume_token(token_id)
        if self._bounded:
            text = self._vocabulary.text(token_id)
            rest = text.rstrip()
            self._blank_run = self._blank_run * (not rest) + len(text) - len(rest)

    def allowed(self) -> Mask:
        """Which tokens may come next (vocabulary,); the end tokens where the text may end."""
        if self.complete:
            return self._vocabulary.ends
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocabulary.size, bitorder="little").view(np.bool_)
        if (mask & self._vocabulary.ends).any() and not self._matcher.is_accepting():
            mask = mask & ~self._vocabulary.ends  # such as a line break that a model has among its end tokens
        if self._blank_run < MAX_BLANK_RUN:
            return mask
        for narrower in (mask & self._vocabulary.quotes, mask & ~self._vocabulary.blanks):
            if narrower.any():
                return narrower
        return mask


class Grammars:
    """Compiles one model's grammars."""

    def __init__(self, tokenizer: TokenizerWrapper, facts: ModelFacts) -> None:
        self._tokenizer = tokenizer
        self._facts = facts

    def of_format(self, response_format: Mapping[str, Json]) -> Grammar:
        """The grammar of a response_format. Raises InvalidGrammar, Unsupported."""
        kind = response_format["type"]
        if kind == "json_object":
            return self.of_schema({"type": "object"})
        if kind == "json_schema":
            return self.of_schema(response_format["schema"])
        if kind == "regex":
            return self._compiled(LLMatcher.grammar_from_regex(_checked(response_format["pattern"])))
        return self._compiled(LLMatcher.grammar_from_lark(_checked(response_format["lark"])))

    def of_schema(self, schema: Json, *, lenient: bool = False) -> Grammar:
        """The JSON texts that a schema accepts; `lenient` passes over keywords that llguidance does not know.

        Raises InvalidGrammar, Unsupported.
        """
        try:
            text = _checked(json.dumps(schema))
            grammar = LLMatcher.grammar_from_json_schema(
                text, overrides={"whitespace_pattern": _BLANK_PATTERN, "lenient": lenient}
            )
        except (ValueError, RecursionError) as exc:
            raise InvalidGrammar(_short(f"the schema cannot be read: {exc}")) from None
        return self._compiled(grammar, bounded=True)

    def _compiled(self, grammar: str, *, bounded: bool = False) -> Grammar:
        vocabulary = self.vocabulary
        start = LLMatcher(vocabulary.tokenizer, grammar, log_level=0)
        if start.is_error():
            raise InvalidGrammar(_short(start.get_error()))
        start.compute_bitmask()  # what is too complex shows at the first mask, at the latest
        if start.is_error():
            raise InvalidGrammar(_short(start.get_error()))
        return Grammar(vocabulary, start, bounded)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Takes a second for a large vocabulary, once. Raises Unsupported."""
        name, ends = self._facts.name, self._facts.eos_token_ids
        if not ends:
            raise Unsupported("response_format", f"{name} has no end token with which such an answer could end")
        try:
            backend = copy.copy(self._tokenizer.backend_tokenizer)
        except AttributeError:
            reason = f"the tokenizer of {name} is a program of its own, which cannot be held to a grammar"
            raise Unsupported("response_format", reason) from None
        backend.no_padding()
        backend.no_truncation()
        tokenizer = LLTokenizer(backend.to_str(), n_vocab=self._facts.vocab_size, eos_token=sorted(ends))
        return Vocabulary(tokenizer, self._facts.vocab_size, ends)


def _checked(text: Json) -> str:
    """The grammar's own text. Raises InvalidGrammar for one that is too long."""
    if not isinstance(text, str):
        raise InvalidGrammar("it is no text")
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidGrammar(f"it has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are taken")
    return text


def _short(reason: str) -> str:
    return reason if len(reason) <= _REASON_CHARS else reason[:_REASON_CHARS] + " ..."
