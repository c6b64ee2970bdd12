"""Forecasts of memory: held against what tiny models of every layout really allocate."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from omlxd.cache.layouts import leaves
from omlxd.engine.estimator import KvCost, LeafCost, TurnEstimator, Widths, turn_bytes
from omlxd.engine.kv_cost import item_bytes, kv_cost
from omlxd.engine.prefill import Prefill, new_caches
from omlxd.engine.widths import widths
from tests.models import MODELS, VOCABULARY, WINDOW, build

PROMPT = [token % VOCABULARY for token in range(7, 7 + 400)]


@pytest.fixture(autouse=True)
def _no_pool() -> Iterator[None]:
    """MLX keeps nothing of what is freed, so that its counters say what is held."""
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


def caches_after(name: str, num_tokens: int, chunk: int) -> list[object]:
    model = build(name)
    prefill = Prefill(model, [*PROMPT[:num_tokens], 1], new_caches(model))
    while prefill.remaining:
        prefill.advance(chunk)
    return prefill.caches


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("num_tokens", "chunk"), [(40, 40), (300, 100), (400, 400)])
def test_a_cache_takes_what_was_computed_from_the_layout(name: str, num_tokens: int, chunk: int) -> None:
    held = sum(leaf.nbytes for leaf in leaves(caches_after(name, num_tokens, chunk)))  # type: ignore[attr-defined]
    foreseen = kv_cost(build(name)).bytes(num_tokens, chunk)
    assert held <= foreseen <= 1.05 * held + (WINDOW + 256) * 1024  # a window's ring is rounded up by a step


def test_reading_the_cost_allocates_nothing() -> None:
    model = build("llama")
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    cost = kv_cost(model)
    assert mx.get_active_memory() - before < 4096
    assert cost.leaves == (LeafCost(row_bytes=2 * 2 * 16 * 4),) * 2  # K and V, two heads, head_dim 16, fp32


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [
        ("qwen3", 2 * 2 * 16 * 4),  # 2 · kv heads · head dim · 4 bytes
        ("deepseek_v3", (32 + 8) * 4),  # the latent and the positions' part of the key
    ],
)
def test_a_tokens_row_is_as_wide_as_its_architecture_says(name: str, row_bytes: int) -> None:
    assert {leaf.row_bytes for leaf in kv_cost(build(name)).leaves} == {row_bytes}


def test_a_window_stops_growing_and_full_attention_does_not() -> None:
    cost = kv_cost(build("gemma3_text"))
    assert [leaf.window for leaf in cost.leaves] == [WINDOW, None]
    window, full = cost.leaves
    assert window.bytes(10_000) == window.bytes(256)
    assert full.bytes(10_240) == 40 * full.bytes(256)


def test_recurrent_state_costs_the_same_at_any_length() -> None:
    cost = kv_cost(build("mamba2"))
    assert all(leaf.row_bytes == 0 and leaf.fixed_bytes > 0 for leaf in cost.leaves)
    assert cost.bytes(1) == cost.bytes(100_000)


def test_quantised_caches_cost_their_packed_width() -> None:
    from mlx_lm.models.cache import QuantizedKVCache

    class Quantised:
        def __init__(self) -> None:
            self.inner = build("llama", head_dim=64)
            self.layers = self.inner.layers

        def make_cache(self) -> list[QuantizedKVCache]:
            return [QuantizedKVCache(group_size=64, bits=4) for _ in self.layers]

        def __call__(self, tokens: mx.array, cache: object) -> mx.array:
            return self.inner(tokens, cache=cache)  # type: ignore[no-any-return]

    # K and V, two heads, 64 values of 4 bits, and a scale and a bias of 4 bytes for each group of 64
    assert {leaf.row_bytes for leaf in kv_cost(Quantised()).leaves} == {2 * 2 * (64 // 2 + 2 * 4)}  # type: ignore[arg-type]


def test_rows_of_one_batch_are_as_long_as_its_longest() -> None:
    cost = KvCost([LeafCost(row_bytes=10)])
    assert cost.padding([256, 1024]) == 10 * (1024 - 256)
    assert cost.padding([512, 512]) == 0
    assert cost.padding([]) == 0


def test_the_longest_row_for_some_bytes_is_found() -> None:
    cost = KvCost([LeafCost(row_bytes=10), LeafCost(row_bytes=100, window=256), LeafCost(fixed_bytes=7)])
    most = cost.most_tokens(10 * 5120 + 100 * 256 + 7)
    assert most == 5120
    assert cost.bytes(most) <= 10 * 5120 + 100 * 256 + 7 < cost.bytes(most + 1)


def chunk_peak(name: str, tokens: int, done: int) -> tuple[int, int]:
    """What one turn took beside the caches, and what was foreseen without any correction."""
    model = build(name)
    mx.eval(model.parameters())
    cost = kv_cost(model)
    prefill = Prefill(model, [*PROMPT[: done + tokens], 1], new_caches(model))
    if done:
        prefill.advance(done)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    prefill.advance(tokens)
    kept = mx.get_active_memory() - before
    took = mx.get_peak_memory() - before - kept
    config = MODELS[name].config
    wide = widths(config, vocabulary=VOCABULARY, item_bytes=item_bytes(model), gpu=False)
    return took, turn_bytes(wide, cost, tokens, done + tokens)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tokens", "done"), [(256, 0), (128, 256)])
def test_a_turns_transient_is_foreseen_within_a_small_factor(name: str, tokens: int, done: int) -> None:
    took, foreseen = chunk_peak(name, tokens, done)
    assert took / 4 <= foreseen <= 8 * took


WIDE = Widths(hidden=64, heads=4, head_dim=16, intermediate=128, vocabulary=320)
COST = KvCost([LeafCost(row_bytes=256)])


def test_a_freak_reading_is_forgotten_after_five_small_prompts() -> None:
    """MM-05."""
    estimator = TurnEstimator(WIDE, COST)
    real = turn_bytes(WIDE, COST, 20, 20)
    estimator.took(30 * turn_bytes(WIDE, COST, 2000, 2000), tokens=2000, context=2000)
    for prompt in range(1, 51):
        if prompt >= 5:
            assert estimator.bytes(20, 20) <= 2 * real
        estimator.took(real, tokens=20, context=20)
    assert real * 0.9 <= estimator.bytes(20, 20) <= real * 1.1


def test_turns_that_take_more_than_foreseen_are_foreseen_larger() -> None:
    estimator = TurnEstimator(WIDE, COST)
    for _ in range(12):
        estimator.took(3 * turn_bytes(WIDE, COST, 100, 500), tokens=100, context=500)
    assert estimator.bytes(100, 500) == pytest.approx(3 * turn_bytes(WIDE, COST, 100, 500), rel=0.05)


def test_attention_that_is_fused_writes_no_scores() -> None:
    fused = Widths(**{name: getattr(WIDE, name) for name in WIDE.__slots__ if name != "fused"}, fused=True)
    scores = 2 * 4 * 100 * 1000 * 2
    assert turn_bytes(WIDE, COST, 100, 1000) - turn_bytes(fused, COST, 100, 1000) == scores


def test_a_turn_shrinks_until_it_fits_and_never_below_the_least() -> None:
    estimator = TurnEstimator(WIDE, COST)
    room = estimator.bytes(256, 1256)
    assert estimator.most_tokens(2048, least=16, done=1000, room=room) == 256
    assert estimator.most_tokens(2048, least=16, done=1000, room=0) == 16
    assert estimator.most_tokens(8, least=16, done=1000, room=0) == 8


def test_a_mixtures_width_is_that_of_its_active_experts() -> None:
    moe = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96, "num_experts_per_tok": 8}
    read = widths(moe, vocabulary=10, item_bytes=2, gpu=True)
    assert (read.intermediate, read.experts) == (32, 8)
    few = widths(moe | {"num_experts_per_tok": 2}, vocabulary=10, item_bytes=2, gpu=True)
    assert (few.intermediate, few.experts) == (96, 1)  # its dense layers are wider


@pytest.mark.parametrize(("head_dim", "fused"), [(64, True), (128, True), (192, False), (256, False)])
def test_attention_is_fused_on_a_gpu_for_the_kernels_widths(head_dim: int, fused: bool) -> None:
    config = {"hidden_size": 2048, "num_attention_heads": 16, "head_dim": head_dim}
    assert widths(config, vocabulary=10, item_bytes=2, gpu=True).fused is fused
    assert widths(config, vocabulary=10, item_bytes=2, gpu=False).fused is False
