"""A GGUF file's tokenizer rebuilt for transformers: byte-level BPE from the tokens and merges in the metadata.

Used by the converter's process; no state. GGUF names the rule that splits text before the merges (`tokenizer.ggml.pre`)
but does not contain it, so each name needs its rule here; another one is refused, since a wrong split gives wrong
tokens without any error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from omlxd.engine.api import Unsupported
from omlxd.engine.gguf_header import BadGguf, Value

# The kinds of tokens that text may not spell out (control) or that are cut out of text first (user defined).
_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_SPLITS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {"gpt-2": _gpt2, "smollm": _smollm} | dict.fromkeys(
    _LLAMA3, _llama3
)


def write_tokenizer(metadata: Mapping[str, Value], folder: Path, *, context_tokens: int, vocab_size: int) -> list[int]:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja; returns the ids that end a text.

    Raises Unsupported naming what is not imported, or BadGguf.
    """
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if not 0 < len(tokens) <= vocab_size or len(set(tokens)) != len(tokens):
        raise BadGguf(f"its {len(tokens)} tokens are not all different, or not as many as the {vocab_size} embedded")
    _tokenizer(metadata, tokens).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        **{f"{role}_token": tokens[n] for role, n in _roles(metadata, tokens).items() if role != "eot"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return sorted({n for role, n in _roles(metadata, tokens).items() if role in ("eos", "eot")})


def _tokenizer(metadata: Mapping[str, Value], tokens: list[str]) -> Tokenizer:
    model, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise Unsupported(f"GGUF tokenizer {model!r}", "byte-level BPE ('gpt2') is imported")
    if not isinstance(split, str) or split not in _SPLITS:
        raise Unsupported(f"GGUF pre-tokenizer {split!r}", f"the ones imported are {', '.join(_SPLITS)}")
    vocabulary = {token: n for n, token in enumerate(tokens)}
    merges = [_merge(pair, vocabulary) for pair in _strings(metadata, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in _LLAMA3))
    tokenizer.pre_tokenizer = _SPLITS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, metadata, tokens)
    _add_bos(tokenizer, metadata, tokens, by_default=split in _LLAMA3)
    return tokenizer


def _merge(pair: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = pair.partition(" ")
    if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise BadGguf(f"tokenizer.ggml.merges has {pair!r}, which joins tokens that it does not have")
    return left, right


def _add_special(tokenizer: Tokenizer, metadata: Mapping[str, Value], tokens: list[str]) -> None:
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise BadGguf("tokenizer.ggml.token_type does not give one kind for each token")
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in chosen])


def _add_bos(tokenizer: Tokenizer, metadata: Mapping[str, Value], tokens: list[str], *, by_default: bool) -> None:
    bos = _roles(metadata, tokens).get("bos")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", by_default):
        token = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, bos)]
        )


def _roles(metadata: Mapping[str, Value], tokens: list[str]) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "unk": "unknown", "pad": "padding"}
    found = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in keys.items()}
    return {role: n for role, n in found.items() if isinstance(n, int) and 0 <= n < len(tokens)}


def _strings(metadata: Mapping[str, Value], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise BadGguf(f"{key} is missing or not a list of strings")
    return [each for each in value if isinstance(each, str)]
