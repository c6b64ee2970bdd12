"""Rows on their way into the batch: the pass that ends their prompts, for the draw of their first tokens.

A prompt's end and its last token are run in one pass where they are short, so that the first token comes a whole pass
sooner; a longer end, and one that is stored with a checkpoint, is run before the last token. Rows that join together
are padded to each other. Used by `batch.py` on the engine thread; with `decoding.py` and `prefill.py` it alone calls
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache

from omlxd.engine.drawing import RowStart
from omlxd.engine.prefill import Caches

# So many tokens of rows that join are run together with the last ones of their prompts. Logits then come for all of
# them, which for more tokens costs more, in time and in memory, than a pass of its own for the last ones.
ONE_PASS_TOKENS = 128

Computed = Callable[[str, Caches, int], None]


def run_alone(model: Module, row: RowStart, computed: Computed, *, last_apart: bool) -> mx.array:
    """Runs the row's tokens on its own caches. Returns the logits (1, vocabulary) after the last one."""
    tokens, lacking = row.tokens, 0
    if len(tokens) > 1 and _two_passes(len(tokens), last_apart=last_apart):
        model(mx.array(list(tokens[:-1]))[None], cache=row.caches)
        mx.eval([cache.state for cache in row.caches])
        computed(row.id, row.caches, 1)
        tokens, lacking = tokens[-1:], 1
    logits = model(mx.array(list(tokens))[None], cache=row.caches)[:, -1]
    mx.eval(logits, [cache.state for cache in row.caches])
    if not lacking and len(tokens) > 1:
        computed(row.id, row.caches, 0)
    return cast("mx.array", logits)


def run_together(
    model: Module, rows: Sequence[RowStart], caches: Caches, computed: Computed, *, last_apart: bool
) -> mx.array:
    """Runs the rows' tokens on their merged `caches`. Returns the logits (rows, vocabulary) after each's last one."""
    tokens, lacking = [list(row.tokens) for row in rows], 0
    longest = max(map(len, tokens))
    if longest > 1 and _two_passes(len(rows) * longest, last_apart=last_apart):
        _padded_pass(model, [row[:-1] for row in tokens], caches)
        mx.eval([cache.state for cache in caches])
        _tell(rows, caches, computed, lacking=1)
        tokens, lacking = [row[-1:] for row in tokens], 1
    logits = _padded_pass(model, tokens, caches)
    last = logits[mx.arange(len(rows)), mx.array([len(row) - 1 for row in tokens])]
    mx.eval(last, [cache.state for cache in caches])
    if not lacking:
        _tell(rows, caches, computed, lacking=0)
    return last


def at_once(num_tokens: int) -> int:
    """How many of the tokens of rows that join, padding included, get logits at once."""
    return num_tokens if num_tokens <= ONE_PASS_TOKENS else 0


def _two_passes(num_tokens: int, *, last_apart: bool) -> bool:
    return last_apart or not at_once(num_tokens)


def _padded_pass(model: Module, tokens: Sequence[Sequence[int]], caches: Caches) -> mx.array:
    """One pass, rows padded on the right to the longest. mlx-lm's merged caches take the padding out again.

    In one pass always: mlx-lm 0.32.2 loses count of a recurrent row's padding between two.
    """
    lengths = [len(row) for row in tokens]
    width = max(lengths)
    padding = [width - length for length in lengths]
    if not any(padding):
        return cast("mx.array", model(mx.array([list(row) for row in tokens]), cache=caches))
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=padding)
    padded = [[*row, *[0] * missing] for row, missing in zip(tokens, padding, strict=True)]
    logits = model(mx.array(padded), cache=caches)
    for cache in caches:
        cache.finalize()
    return cast("mx.array", logits)


def _tell(rows: Sequence[RowStart], caches: Caches, computed: Computed, *, lacking: int) -> None:
    for index, row in enumerate(rows):
        if len(row.tokens) > 1:
            computed(row.id, [row_of(cache, index) for cache in caches], lacking)


def row_of(cache: Any, index: int) -> Any:
    """One row's cache out of a merged one.

    Full attention is handed out as a view: mlx-lm's `extract` would copy the whole row to keep its last block.
    """
    if type(cache) is CacheList:
        return CacheList(*(row_of(leaf, index) for leaf in cache.caches))
    if type(cache) is BatchKVCache:
        keys, values, _, left_padding, stop = cache.state
        start = int(left_padding[index].item())
        rows = slice(index, index + 1), slice(None), slice(start, stop)
        return KVCache.from_state((keys[rows], values[rows], stop - start))
    return cache.extract(index)
