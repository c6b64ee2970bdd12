"""Fill-in-the-middle: the prompt that asks a code model for what belongs between two texts.

Each family has tokens of its own for it, and its own order of the parts. The prefix comes before the suffix wherever
the family allows that: the prompt of one keystroke then begins like that of the one before, up to the cursor. Pure
functions, on the tokenizer thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from omlxd.engine.api import Unsupported

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True, slots=True)
class FimTokens:
    """One family's tokens. `suffix_first` puts the suffix before the prefix; `ends` end an answer, where they exist."""

    prefix: str
    suffix: str
    middle: str = ""
    ends: tuple[str, ...] = ()
    suffix_first: bool = False


_FAMILIES = (
    # Qwen2.5-Coder, CodeGemma, Granite
    FimTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>")),
    # StarCoder, SmolLM
    FimTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>", "<repo_name>")),
    FimTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>",)),  # SantaCoder
    # DeepSeek-Coder: the hole stands between the two texts
    FimTokens("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    FimTokens("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",)),  # CodeLlama
    FimTokens("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)


@dataclass(frozen=True, slots=True)
class FimIds:
    """A model's fill-in-the-middle tokens. `end_ids` end an answer: in the middle of a text they mean nothing else."""

    tokens: FimTokens
    prefix: int
    suffix: int
    middle: int | None
    end_ids: frozenset[int]


def fim_of(tokenizer: TokenizerWrapper) -> FimIds | None:
    """The tokens of the first family that the vocabulary has whole."""
    vocabulary = tokenizer.get_vocab()
    for family in _FAMILIES:
        needed = [token for token in (family.prefix, family.suffix, family.middle) if token]
        if all(token in vocabulary for token in needed):
            return FimIds(
                family,
                vocabulary[family.prefix],
                vocabulary[family.suffix],
                vocabulary[family.middle] if family.middle else None,
                frozenset(vocabulary[token] for token in (*needed, *family.ends) if token in vocabulary),
            )
    return None


def fim_prompt(prefix: str, suffix: str, fim: FimIds | None, tokenizer: TokenizerWrapper, model: str) -> list[int]:
    """Token ids that ask for the middle. Raises Unsupported for a model without tokens for it."""
    if fim is None:
        known = ", ".join(family.prefix for family in _FAMILIES)
        reason = f"{model} has no fill-in-the-middle tokens (known are {known}, ...); use a code model that has them"
        raise Unsupported("suffix", reason)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    before, after = [fim.prefix, *encode(prefix)], [fim.suffix, *encode(suffix)]
    parts = [*after, *before] if fim.tokens.suffix_first else [*before, *after]
    bos = tokenizer.bos_token_id
    begins_with_bos = bos is not None and list(tokenizer.encode("", verbose=False))[:1] == [bos]
    return [*([bos] if begins_with_bos else []), *parts, *([] if fim.middle is None else [fim.middle])]
