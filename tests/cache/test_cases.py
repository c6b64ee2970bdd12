"""CASES.md topic A on the library: each compares with a cold run of the same model.

PC-31 needs the SSD tier. Of PC-13 and PC-15 the cache's side is here; a vision model's own side is the engine's.
"""

from __future__ import annotations

import json
import random

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from omlxd.cache.hot import HotTier
from omlxd.cache.identity import identify
from omlxd.cache.keys import MediaSpan
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from omlxd.cache.registry import CacheRegistry
from tests.cache.running import (
    BLOCK,
    PLENTY,
    TOLERANCE,
    assert_cold,
    assert_equal,
    generate,
    model,
    new_cache,
    oracle,
    prompt,
)
from tests.models import IM_END, IM_START, WINDOW, build, cold_run, write


def test_pc01_a_ring_is_not_cut_by_logical_length():
    cache, p1 = new_cache("gemma3_text"), prompt(40)
    assert_cold("gemma3_text", p1, generate("gemma3_text", cache, p1, n=4))
    p2 = [*p1[:24], *prompt(10, seed=1)]
    run = generate("gemma3_text", cache, p2, n=16)
    assert_cold("gemma3_text", p2, run)
    assert run.cached_tokens == 24


def test_pc03_chunks_into_a_nearly_full_ring_restore_at_every_boundary():
    net, tokens, cache = model("gemma3_text"), prompt(33), new_cache("gemma3_text")
    hit = cache.lookup(tokens)
    for start in range(0, 33, 5):
        stop = min(33, start + 5)
        logits = net(mx.array(tokens[start:stop])[None], cache=hit.caches)[0, -1]
        cache.publish(tokens, hit.caches, stop)
        one_shot = net(mx.array(tokens[:stop])[None], cache=make_prompt_cache(net))[0, -1]
        restored = cache.lookup([*tokens[:stop], 0])
        assert restored.num_tokens == stop
        following = net(mx.array([[7]]), cache=restored.caches)[0, -1]
        expected = net(mx.array([[*tokens[:stop], 7]]), cache=make_prompt_cache(net))[0, -1]
        for one, other in ((logits, one_shot), (following, expected)):
            assert float(mx.abs(one - other).max()) <= TOLERANCE
        rings = [leaf for leaf in hit.caches if isinstance(leaf, RotatingKVCache)]
        assert all(leaf.keys.shape[2] <= WINDOW + 5 - 1 for leaf in rings)


def test_pc05_a_state_of_64_tokens_is_not_taken_for_one_of_37():
    cache, p1 = new_cache("qwen3_next"), prompt(64)
    generate("qwen3_next", cache, p1, chunk=BLOCK)
    p2 = [*p1[:37], *prompt(12, seed=1)]
    run = generate("qwen3_next", cache, p2)
    assert_cold("qwen3_next", p2, run)
    assert run.cached_tokens == 32


def test_pc07_a_four_slot_recurrent_cache_is_reused():
    cache, tokens = new_cache("kimi_linear"), prompt(40)
    for _ in range(2):
        assert_cold("kimi_linear", tokens, generate("kimi_linear", cache, tokens))
    longer = [*tokens, *prompt(20, seed=1)]
    run = generate("kimi_linear", cache, longer)
    assert_cold("kimi_linear", longer, run)
    assert run.cached_tokens == 40


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1", "mamba2"])
def test_pc09_every_turn_of_a_conversation_reuses_the_one_before(name):
    cache, tokens = new_cache(name), []
    for turn in range(5):
        previous = len(tokens)
        tokens = [*tokens, *prompt(24, seed=turn)]
        run = generate(name, cache, tokens, n=6)
        assert_cold(name, tokens, run)
        assert run.cached_tokens == previous
        tokens = run.tokens
    stats = cache.stats()
    assert (stats.lookups, stats.hits) == (5, 4)
    assert stats.reused_tokens == sum(24 * n + 5 * n for n in range(1, 5))


def test_pc11_an_exact_hit_leaves_a_token_to_compute():
    cache, tokens = new_cache("llama"), prompt(21)
    assert_cold("llama", tokens, generate("llama", cache, tokens))
    assert generate("llama", cache, tokens).cached_tokens == 20
    hits = [cache.lookup(tokens) for _ in range(3)]
    rows = [(n, [hit.caches], tokens) for n, hit in enumerate(hits)]
    running = None
    for uid, caches, ids in rows:
        row = PromptProcessingBatch(model("llama"), [uid], caches, tokens=[ids[:-1]]).generate([[ids[-1]]])
        running = row if running is None else running.extend(row) or running
    steps = [running.next() for _ in range(12)]
    for row in range(3):
        ids = [step[row].token for step in steps]
        assert_equal(ids, mx.stack([step[row].logprobs for step in steps]), oracle("llama", tokens, 12))


RED, BLUE = b"red picture", b"blue picture"


def test_pc13_two_pictures_under_one_text_share_only_what_is_before_them():
    """The same ids, so that only the picture's digest keeps the two apart."""
    cache, tokens = new_cache("llama", block=4), prompt(30)
    red, blue = ((MediaSpan(6, 15, digest),) for digest in (RED, BLUE))
    assert generate("llama", cache, tokens, media=red).cached_tokens == 0
    assert generate("llama", cache, tokens, media=blue).cached_tokens == 6
    assert generate("llama", cache, tokens, media=()).cached_tokens == 6
    assert generate("llama", cache, tokens, media=red).cached_tokens == 29


@pytest.mark.parametrize("text", [0, 1, 2, 3, 7])
def test_pc15_a_hit_never_ends_inside_a_picture(text):
    cache = new_cache("llama", block=4)
    tokens, picture = prompt(text + 9 + 5, seed=text), (MediaSpan(text, text + 9, RED),)
    generate("llama", cache, tokens, media=picture)
    for stop in range(text + 1, len(tokens)):
        other = [*tokens[:stop], 319, 318]
        spans = picture if stop >= text + 9 else (MediaSpan(text, stop, RED),)
        run = generate("llama", cache, other, n=2, media=spans)
        assert_cold("llama", other, run)
        assert not text < run.cached_tokens < text + 9
        assert run.cached_tokens == (stop if stop >= text + 9 else text)


@pytest.mark.parametrize("computed", [4, 6, 8, 12])
def test_pc15_a_prefill_that_was_aborted_inside_a_picture_is_used_up_to_the_picture(computed):
    cache, tokens, picture = new_cache("llama", block=4), prompt(20), (MediaSpan(5, 12, RED),)
    hit = cache.lookup(tokens, picture)
    model("llama")(mx.array(tokens[:computed])[None], cache=hit.caches)
    cache.publish(tokens, hit.caches, computed, picture)
    hit.release()
    assert cache.match_length(tokens, picture) == (5 if 5 < computed < 12 else computed)
    run = generate("llama", cache, tokens, media=picture)
    assert_cold("llama", tokens, run)


def lora(directory, seed):
    """Random LoRA weights in a directory of their own, and a model that has them."""
    net = build("llama")
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    linear_to_lora_layers(net, 2, parameters)
    flat = tree_flatten(net.trainable_parameters())
    own = {k: mx.random.normal(v.shape, scale=0.1, key=mx.random.key(seed)) for k, v in flat if "lora_" in k}
    net.load_weights(list(own.items()), strict=False)
    mx.eval(net.parameters())
    directory.mkdir()
    mx.save_safetensors(str(directory / "adapters.safetensors"), own)
    (directory / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "lora_parameters": parameters})
    )
    return net


def test_pc17_adapters_and_their_base_share_nothing(tmp_path):
    registry, tokens = CacheRegistry(HotTier(PLENTY)), prompt(40)
    folder = write("llama", tmp_path / "model")
    nets = {None: model("llama"), **{tmp_path / n: lora(tmp_path / n, seed) for seed, n in enumerate(["a1", "a2"])}}
    layout = ModelLayout(make_prompt_cache(model("llama")))
    for n, adapter in enumerate([*nets, None]):
        identity = identify(folder, layout=layout.signature, block_size=BLOCK, adapter=adapter)
        cache = registry.open(str(adapter), identity, layout)
        run = generate("llama", cache, tokens, net=nets[adapter])
        assert_equal(run.ids, run.logprobs, cold_run(nets[adapter], tokens, 12))
        assert run.cached_tokens == (39 if n == 3 else 0)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_pc19_a_template_that_renders_old_turns_differently_costs_that_turn_only(name):
    """The generation prompt ends in an empty think block that the history leaves out."""
    think, cache, history = [90, 91, 92, 93], new_cache(name), []
    rendered: list[int] = []
    for turn in range(4):
        history = [*history, IM_START, *prompt(20, seed=turn), IM_END, IM_START]
        asked = [*history, *think]
        common = next((i for i, (a, b) in enumerate(zip(rendered, asked, strict=False)) if a != b), len(rendered))
        hit = cache.lookup(asked)
        assert hit.num_tokens >= common // BLOCK * BLOCK - BLOCK
        # The scheduler's checkpoint at the message boundary, before the think block.
        net = model(name)
        for start, stop in ((hit.num_tokens, len(history)), (len(history), len(asked))):
            if start < stop:
                net(mx.array(asked[start:stop])[None], cache=hit.caches)
                cache.checkpoint(asked, hit.caches, stop)
        hit.release()
        run = generate(name, cache, asked, n=8)
        assert_cold(name, asked, run)
        rendered, history = run.tokens, [*history, *run.ids, IM_END]


def test_pc21_a_retokenised_answer_is_reused_up_to_where_its_ids_differ():
    cache, tokens = new_cache("llama"), prompt(20)
    run = generate("llama", cache, tokens, n=4)
    merged = [*tokens, run.ids[0], (run.ids[1] + 1) % 320, *run.ids[2:], 5, 6]
    again = generate("llama", cache, merged)
    assert again.cached_tokens == 21
    assert_cold("llama", merged, again)


def quantised(bits):
    return [QuantizedKVCache(group_size=32, bits=bits) for _ in range(2)]


def quantised_run(net, cache, tokens, n, caches=None):
    hit = cache.lookup(tokens) if cache else None
    caches = hit.caches if hit else caches
    start = hit.num_tokens if hit else 0
    logits = net(mx.array(tokens[start:])[None], cache=caches)[0, -1]
    steps = []
    for _ in range(n):
        steps.append(logits - mx.logsumexp(logits, keepdims=True))
        if cache and len(steps) == 1:
            cache.publish(tokens, caches, len(tokens))
        logits = net(mx.argmax(logits, keepdims=True)[None], cache=caches)[0, -1]
    if hit:
        hit.release()
        cache.check()
    return mx.stack(steps), start


def test_pc23_each_precision_of_keys_and_values_has_its_own_blocks(tmp_path):
    net = build("llama", head_dim=64)
    folder = write("llama", tmp_path / "model")
    registry = CacheRegistry(HotTier(PLENTY))
    tokens = prompt(40)
    for n, (kv, empty) in enumerate(
        [("", make_prompt_cache(net)), ("8 bits", quantised(8)), ("4 bits", quantised(4)), ("8 bits", quantised(8))]
    ):
        layout = ModelLayout(empty)
        identity = identify(folder, layout=layout.signature, block_size=BLOCK, kv=kv)
        cache = registry.open("m", identity, layout)
        for asked, cached in ((tokens, 0), ([*tokens, *prompt(20, seed=1)], 40)):
            steps, start = quantised_run(net, cache, asked, 6)
            assert start == cached, (n, kv)
            # A quantised cold run computed in the same two pieces: attention over packed keys depends on the pieces.
            cold, _ = quantised_run(net, None, asked, 6, caches=layout.fresh())
            assert float(mx.abs(steps - cold).max()) <= TOLERANCE


@pytest.mark.parametrize("name", ["deepseek_v32", "falcon_h1"])
def test_pc25_a_nested_cache_goes_back_as_far_as_it_has_to(name):
    cache, p1 = new_cache(name), prompt(50)
    generate(name, cache, p1)
    p2 = [*p1[:3], *prompt(40, seed=1)]
    run = generate(name, cache, p2)
    assert_cold(name, p2, run)
    assert run.cached_tokens == (3 if name == "deepseek_v32" else 0)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_pc27_two_live_requests_on_one_hit_do_not_see_each_other(name):
    net, cache, p = model(name), new_cache(name), prompt(40)
    generate(name, cache, p, n=1)
    asked = [[*p, *prompt(4, seed=n)] for n in (1, 2)]
    hits = [cache.lookup(tokens) for tokens in asked]
    states = []
    for tokens, hit in zip(asked, hits, strict=True):
        assert hit.num_tokens == 40
        states.append(net(mx.array(tokens[40:])[None], cache=hit.caches)[0, -1])
    steps = ([], [])
    for step in range(40):
        for n, hit in enumerate(hits):
            if n == 1 and step >= 5:  # cancelled
                hit.release()
                continue
            steps[n].append(states[n] - mx.logsumexp(states[n], keepdims=True))
            states[n] = net(mx.argmax(states[n], keepdims=True)[None], cache=hit.caches)[0, -1]
    for n, count in ((0, 40), (1, 5)):
        assert float(mx.abs(mx.stack(steps[n]) - oracle(name, asked[n], count)[1]).max()) <= TOLERANCE
    assert_cold(name, p, generate(name, cache, p))


def test_pc29_eviction_keeps_chains_whole_from_their_start():
    """A budget of 6 blocks of the model; p has 5, q has 3."""
    measured = new_cache("llama")
    generate("llama", measured, prompt(BLOCK), n=1)
    tier = HotTier(6 * measured.stats().nbytes)
    cache = PrefixCache(root=b"r", layout=ModelLayout(make_prompt_cache(model("llama"))), tier=tier, block_size=BLOCK)
    p, q = prompt(5 * BLOCK, seed=1), prompt(3 * BLOCK, seed=2)
    generate("llama", cache, p, n=1)
    generate("llama", cache, q, n=1)
    assert tier.stats().used_bytes == tier.stats().budget_bytes
    run = generate("llama", cache, p, n=1)
    assert run.cached_tokens == 3 * BLOCK
    assert_cold("llama", p, run)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon_h1"])
def test_pc30_churn_in_a_budget_of_four_blocks_never_gives_a_false_hit(name):
    """60 random prompts of 3 shared first blocks and random tails; the property test does the same by the thousand."""
    measured = new_cache(name)
    generate(name, measured, prompt(BLOCK), n=1)
    cache = new_cache(name, budget=4 * measured.stats().nbytes)
    draw = random.Random(0)
    reused = 0
    for _ in range(60):
        tokens = [*prompt(BLOCK, seed=draw.randrange(3)), *prompt(draw.randrange(1, 40), seed=draw.randrange(5, 9))]
        run = generate(name, cache, tokens, n=2, chunk=BLOCK)
        assert_cold(name, tokens, run)
        reused += run.cached_tokens
    assert reused > 0
