"""The shortest way from token ids to text: a tokenizer's Rust decoder, without the Python around it.

Every token of every row is decoded twice, and most of what that takes is not the decoding. Used where a model's
tokenizer is taken over; what it gives belongs to the engine thread, as the tokenizer does.
"""

from __future__ import annotations

import inspect

from transformers import PreTrainedTokenizerFast

from omlxd.engine.text import Decoder

# What the Python around a decoder may change: blanks before punctuation and contractions, line breaks, blanks at the
# edges, doubled blanks, wide characters.
_SAMPLE = " I do n't , you 're  here . What ?\n<n>\t Yes ! \u2582na\u00efve \u4e2d\u6587 \U0001f44b"


def direct(tokenizer: Decoder) -> Decoder:
    """The decoder beneath the tokenizer's own `decode`, where both read a sample alike; else the tokenizer itself."""
    decode = tokenizer.decode
    whole = decode.__self__ if inspect.ismethod(decode) else None  # beneath mlx-lm's wrapper
    if not isinstance(whole, PreTrainedTokenizerFast):
        return tokenizer
    beneath: Decoder = whole.backend_tokenizer
    ids: list[int] = whole.backend_tokenizer.encode(_SAMPLE).ids
    same = beneath.decode(ids, skip_special_tokens=False) == decode(ids, skip_special_tokens=False)
    return beneath if same else tokenizer
