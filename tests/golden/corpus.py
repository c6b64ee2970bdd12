"""The golden corpora: per family of models, token streams and the channel deltas that must come of them.

A file is one family: its template, its own tokens (true: special), its model_type where that matters, and its cases.
A case gives the pieces that the model says, one token each, and what a client must see: `deltas`, exactly as they come
token by token, how it ended, and the calls. To add a family, write a file; `python -m tests.golden.show FAMILY` prints
what the code makes of its cases.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlxd.engine.api import ChatPrompt, GenerateRequest, Sampling, Stopping, Thinking
from omlxd.engine.model import LoadedModel, ModelFacts
from tests.golden.script import Piece, Script, family_tokenizer, ids_of
from tests.models import IM_END

FOLDER = Path(__file__).parent
TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"t": {"type": "string"}, "n": {"type": "integer"}},
                "required": [],
                "additionalProperties": False,
            },
        },
    }
    for name in ("w", "rm")
)


@dataclass(frozen=True)
class Case:
    """One token stream of a family. `end` is false where the stream is cut by max_tokens instead of ending."""

    family: str
    name: str
    pieces: tuple[Piece, ...]
    deltas: tuple[tuple[str, str], ...] = ()
    finish: str = "stop"
    end: bool = True
    end_piece: str | None = None  # an end token of the family's own
    tools: bool = False
    messages: tuple[Mapping[str, Any], ...] = ({"role": "user", "content": "hi"},)
    thinking: Mapping[str, Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    malformed: tuple[str, ...] = ()  # a word of each reason

    @property
    def id(self) -> str:
        return f"{self.family}: {self.name}"

    def text(self, channel: str) -> str:
        return "".join(text for of, text in self.deltas if of == channel)

    def request(self) -> GenerateRequest:
        return GenerateRequest(
            model=self.family,
            prompt=ChatPrompt(self.messages, TOOLS if self.tools else (), None, self.kwargs),
            sampling=Sampling(temperature=0),
            stopping=Stopping(max_tokens=500 if self.end else len(self.pieces), stop=self.stop),
            thinking=None if self.thinking is None else Thinking(**self.thinking),
            stream=True,
        )

    def tokenizer(self) -> TokenizerWrapper:
        """Made once per case."""
        if self.id not in _tokenizers:
            _tokenizers[self.id] = _tokenizer(self)
        return _tokenizers[self.id]

    def ids(self) -> list[int]:
        """What the model says, its end included."""
        end = [] if not self.end or self.end_piece is None else [self.end_piece]
        return ids_of([*self.pieces, *end], self.tokenizer())

    def end_id(self) -> int:
        return IM_END if self.end_piece is None else self.ids()[-1]

    def model(self) -> LoadedModel:
        """A model that says this case."""
        tokenizer = self.tokenizer()
        vocab_size = len(tokenizer)
        ends = frozenset({IM_END, self.end_id()} if self.end else {IM_END})
        facts = ModelFacts(self.family, Path("/nowhere"), 2048, vocab_size, ends, True, 0)
        return LoadedModel(Script(self.ids(), vocab_size), tokenizer, facts)


_tokenizers: dict[str, TokenizerWrapper] = {}


@cache
def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _tokenizer(case: Case) -> TokenizerWrapper:
    file = _read(FOLDER / f"{case.family}.json")
    with tempfile.TemporaryDirectory() as folder:
        model_type = file.get("model_type", "llama")
        return family_tokenizer(Path(folder), file["tokens"], case.pieces, file["template"], model_type)


def cases(family: str = "*") -> Iterator[Case]:
    for path in sorted(FOLDER.glob(f"{family}.json")):
        for given in _read(path)["cases"]:
            frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
            for pairs in ("deltas", "calls"):
                frozen[pairs] = tuple(tuple(pair) for pair in given.get(pairs, ()))
            yield Case(path.stem, **frozen)
