"""The text layers of mlx-vlm models, on mlx-vlm's own cache classes, answer from restored caches like a cold run."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.models.gemma3.config import TextConfig
from mlx_vlm.models.gemma3.language import LanguageModel

from omlxd.cache.hot import HotTier
from omlxd.cache.layouts import ModelLayout, class_name
from omlxd.cache.prefix import PrefixCache
from tests.cache.running import BLOCK, PLENTY, TOLERANCE, prompt
from tests.models import VOCABULARY, WINDOW


@pytest.fixture(scope="module")
def net():
    config = TextConfig(
        model_type="gemma3_text",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        head_dim=16,
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
    )
    mx.random.seed(0)
    net = LanguageModel(config)
    flat = [(path, value * 2 if value.ndim > 1 else value) for path, value in tree_flatten(net.parameters())]
    net.update(tree_unflatten(flat))
    mx.eval(net.parameters())
    return net


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@pytest.mark.parametrize("position", [5, 16, 30, 48, 63])
def test_every_position_of_a_prompt_restores(net, chunk, position):
    layout, tokens = ModelLayout(net.make_cache()), prompt(64)
    assert {class_name(leaf) for leaf in layout.fresh()} == {
        "mlx_vlm.models.cache.KVCache",
        "mlx_vlm.models.cache.RotatingKVCache",
    }
    cold = net(mx.array(tokens)[None], cache=layout.fresh()).logits[0]
    cache = PrefixCache(root=b"r", layout=layout, tier=HotTier(PLENTY), block_size=BLOCK)
    hit = cache.lookup(tokens)
    for start in range(0, 64, chunk):
        net(mx.array(tokens[start : start + chunk])[None], cache=hit.caches)
        cache.publish(tokens, hit.caches, start + chunk if start + chunk < 64 else 64)
    hit.release()
    restored = cache.lookup([*tokens[:position], 0])
    assert restored.num_tokens == position
    # In one piece, and token by token on a ring that turns.
    rest = net(mx.array(tokens[position:])[None], cache=restored.caches).logits[0]
    assert float(mx.abs(rest - cold[position:]).max()) <= TOLERANCE
    stepped = cache.lookup([*tokens[:position], 0])
    for n in range(position, 64):
        step = net(mx.array([[tokens[n]]]), cache=stepped.caches).logits[0, -1]
        assert float(mx.abs(step - cold[n]).max()) <= TOLERANCE
    cache.check()
