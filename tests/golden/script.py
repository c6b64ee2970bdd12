"""A model that says a given list of tokens, whatever the prompt, and a tokenizer with a family's own tokens.

The script is followed by position, so a token may occur any number of times. Its caches fill like any llama's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from tests.models import IM_END, SPECIAL, build, byte_letters

Piece = str | Sequence[int]  # a token's text, or its bytes


class Script(nn.Module):
    """Says `ids` after a prompt of `prompt_tokens`, then IM_END for ever. `favour` adds to the logits of any tokens."""

    def __init__(self, ids: Sequence[int], vocab_size: int, favour: Mapping[int, float] | None = None) -> None:
        super().__init__()
        self._inner = build("llama", vocab_size=vocab_size)
        self.layers = self._inner.layers
        self._ids = mx.array([*ids, IM_END])
        self._vocab_size = vocab_size
        self._favour = mx.zeros(vocab_size)
        for id, logit in (favour or {}).items():
            self._favour[id] = logit
        self.prompt_tokens = 0
        mx.eval(self._ids, self._favour)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self._inner(inputs, cache=cache)
        seen = mx.array(cache[0].offset).reshape(-1, 1) - inputs.shape[1] + 1 + mx.arange(inputs.shape[1])[None]
        at = mx.clip(seen - self.prompt_tokens, 0, len(self._ids) - 1)
        chosen = mx.broadcast_to(self._ids[at], inputs.shape)
        return 18.0 * (chosen[..., None] == mx.arange(self._vocab_size)) + self._favour


def family_tokenizer(
    directory: Path, added: Mapping[str, bool], pieces: Sequence[Piece], template: str, model_type: str = "llama"
) -> TokenizerWrapper:
    """Bytes, the family's added tokens (true: special) and a token for every longer piece, loaded as mlx-lm does it.

    For some model types mlx-lm knows more than the tokenizer's files say.
    """
    letters = byte_letters()
    vocabulary = {letters[byte]: byte for byte in range(256)} | {text: id for id, text in SPECIAL.items()}
    for text in added:
        vocabulary.setdefault(text, len(vocabulary))
    for piece in pieces:
        data = piece.encode() if isinstance(piece, str) else bytes(piece)
        if not (isinstance(piece, str) and (piece in added or piece in SPECIAL.values())):
            vocabulary.setdefault("".join(letters[byte] for byte in data), len(vocabulary))
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text, special in added.items() if not special])
    special = [*SPECIAL.values(), *(text for text, special in added.items() if special)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[IM_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return load_tokenizer(directory)


def ids_of(pieces: Sequence[Piece], tokenizer: TokenizerWrapper) -> list[int]:
    """The token of each piece: an added token by its text, any other by its bytes."""
    vocabulary, letters = tokenizer.get_vocab(), byte_letters()
    ids = []
    for piece in pieces:
        data = piece.encode() if isinstance(piece, str) else bytes(piece)
        spelled = "".join(letters[byte] for byte in data)
        ids.append(vocabulary[piece] if isinstance(piece, str) and piece in vocabulary else vocabulary[spelled])
    return ids
