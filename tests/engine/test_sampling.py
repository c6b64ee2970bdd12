"""A row's draw depends on its own settings, seed and position, and on nothing else."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from omlxd.engine.api import Sampling
from omlxd.engine.model import SamplingDefaults
from omlxd.engine.sampling import BatchSampler, Penalties, SamplerRow, bias_processor, likely, read_likely
from omlxd.engine.sampling_settings import SamplingSettings, resolve

VOCABULARY = 12


def flat(rows: int = 1) -> mx.array:
    return mx.full((rows, VOCABULARY), -math.log(VOCABULARY))


def ladder() -> mx.array:
    """Log-probabilities of 1/2, 1/4, 1/8, ... for tokens 0, 1, 2, ..."""
    return mx.array([[-(n + 1) * math.log(2) for n in range(VOCABULARY)]])


def draws(settings: SamplingSettings, logprobs: mx.array, count: int = 200) -> list[int]:
    sampler = BatchSampler([SamplerRow(settings)])
    return [int(sampler(logprobs).item()) for _ in range(count)]


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others() -> None:
    one = SamplingSettings(seed=7, temperature=1.0)
    assert draws(one, flat(), 50) == draws(one, flat(), 50)
    assert draws(one, flat(), 50) != draws(SamplingSettings(seed=8, temperature=1.0), flat(), 50)


def test_a_row_draws_in_company_what_it_draws_alone() -> None:
    settings = [
        SamplingSettings(seed=1, temperature=1.0),
        SamplingSettings(seed=2, temperature=0.0),
        SamplingSettings(seed=3, temperature=0.5, top_p=0.9),
        SamplingSettings(seed=1, temperature=2.0, top_k=5, min_p=0.01),
    ]
    random = mx.random.normal((4, 20, VOCABULARY), key=mx.random.key(5))
    logprobs = random - mx.logsumexp(random, axis=-1, keepdims=True)
    together = BatchSampler([SamplerRow(s) for s in settings])
    shared = [together(logprobs[:, step]).tolist() for step in range(20)]
    for row, own in enumerate(settings):
        alone = BatchSampler([SamplerRow(own)])
        assert [alone(logprobs[row : row + 1, step]).item() for step in range(20)] == [step[row] for step in shared]


def test_a_row_that_left_and_came_back_goes_on_where_it_was() -> None:
    settings = SamplingSettings(seed=9, temperature=1.0)
    whole = draws(settings, flat(), 20)
    resumed = BatchSampler([SamplerRow(settings, index=12)])
    assert [resumed(flat()).item() for _ in range(8)] == whole[12:]


def test_rows_keep_their_settings_when_others_leave_or_join() -> None:
    sampler = BatchSampler([SamplerRow(SamplingSettings(seed=n, temperature=1.0)) for n in range(3)])
    before = sampler(flat(3)).tolist()
    sampler.keep([0, 2])
    sampler.extend([SamplerRow(SamplingSettings(seed=5, temperature=1.0))])
    after = sampler(flat(3)).tolist()
    for row, (seed, done) in enumerate([(0, before[0]), (2, before[2])]):
        assert draws(SamplingSettings(seed=seed, temperature=1.0), flat(), 2) == [done, after[row]]


def test_temperature_zero_takes_the_best_token() -> None:
    assert set(draws(SamplingSettings(seed=1), ladder(), 20)) == {0}


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.7}, {0, 1}),  # 1/2 has not reached 0.7, so 1/4 is in; 3/4 has
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.2}, {0, 1, 2}),  # at least a fifth of the best: 1/2, 1/4, 1/8
        ({"top_k": 3, "top_p": 0.7}, {0, 1}),
        ({"top_k": 10_000}, set(range(6))),
    ],
)
def test_only_tokens_inside_the_limits_are_drawn(limits: dict[str, float], allowed: set[int]) -> None:
    seen = set(draws(SamplingSettings(seed=3, temperature=1.0, **limits), ladder(), 300))
    assert seen >= allowed if len(allowed) == 6 else seen == allowed


def test_xtc_drops_every_top_choice_but_the_least_likely() -> None:
    always = SamplingSettings(seed=3, temperature=1.0, xtc_probability=1.0, xtc_threshold=0.2)
    assert not {0} & set(draws(always, ladder()))  # 1/2 and 1/4 are above the threshold: 1/2 goes, 1/4 stays
    assert 1 in draws(always, ladder())
    assert 0 in draws(SamplingSettings(seed=3, temperature=1.0, xtc_threshold=0.2), ladder())


def test_draws_follow_the_probabilities() -> None:
    seen = draws(SamplingSettings(seed=11, temperature=1.0), ladder(), 2000)
    assert seen.count(0) / 2000 == pytest.approx(0.5, abs=0.05)
    assert seen.count(1) / 2000 == pytest.approx(0.25, abs=0.05)


def penalised(settings: SamplingSettings, prompt: list[int], answer: list[int]) -> list[float]:
    """The logits after `answer`, all ones before, the processor called token by token."""
    logits = mx.ones((1, VOCABULARY))
    processor = Penalties(settings, prompt=prompt[:-1], answer=None, vocab_size=VOCABULARY)
    for token in [prompt[-1], *answer]:
        result = processor(mx.array([token]), logits)
    return [round(value, 4) for value in result[0].tolist()]


def test_repetition_counts_the_prompt_and_the_other_penalties_only_the_answer() -> None:
    repeated = penalised(SamplingSettings(seed=0, repetition_penalty=2.0), [1, 2], [3, 3])
    assert repeated[:5] == [1, 0.5, 0.5, 0.5, 1]
    present = penalised(SamplingSettings(seed=0, presence_penalty=0.25), [1, 2], [3, 3])
    assert present[:5] == [1, 1, 1, 0.75, 1]
    frequent = penalised(SamplingSettings(seed=0, frequency_penalty=0.25), [1, 2], [3, 3])
    assert frequent[:5] == [1, 1, 1, 0.5, 1]


def test_penalties_of_a_resumed_answer_are_those_of_an_uninterrupted_one() -> None:
    settings = SamplingSettings(seed=0, repetition_penalty=1.5, presence_penalty=0.1, frequency_penalty=0.2)
    whole = penalised(settings, [1, 2], [3, 4, 3])
    resumed = Penalties(settings, prompt=[1, 2], answer=[3, 4], vocab_size=VOCABULARY)
    result = resumed(mx.array([3]), mx.ones((1, VOCABULARY)))
    assert [round(value, 4) for value in result[0].tolist()] == whole


def test_an_answer_of_one_token_is_resumed_as_an_answer() -> None:
    settings = SamplingSettings(seed=0, presence_penalty=0.25)
    resumed = Penalties(settings, prompt=[1, 2], answer=[], vocab_size=VOCABULARY)
    result = resumed(mx.array([3]), mx.ones((1, VOCABULARY)))
    assert [round(value, 4) for value in result[0].tolist()] == penalised(settings, [1, 2], [3])


def test_a_bias_moves_its_token_alone() -> None:
    biased = bias_processor({2: 5.0, 3: -math.inf})(mx.array([0]), mx.zeros((1, 5)))
    assert biased.tolist() == [[0, 0, 5, -math.inf, 0]]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-6])
def test_the_smallest_temperatures_take_the_best_token(temperature: float) -> None:
    settings = SamplingSettings(seed=1, temperature=temperature, top_k=5, xtc_probability=0.0)
    assert set(draws(settings, ladder()[:, ::-1], 20)) == {VOCABULARY - 1}


def test_the_largest_temperatures_draw_from_what_the_limits_leave() -> None:
    assert set(draws(SamplingSettings(seed=1, temperature=1e308, top_k=2), ladder()[:, ::-1])) == {10, 11}


def test_a_top_k_beyond_every_vocabulary_and_every_integer_of_the_device_is_no_limit() -> None:
    assert draws(SamplingSettings(seed=1, temperature=1.0, top_k=1 << 70), ladder()) == draws(
        SamplingSettings(seed=1, temperature=1.0, top_k=VOCABULARY), ladder()
    )


@pytest.mark.parametrize("kind", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 1e30, 1e300])
def test_the_hardest_penalties_leave_finite_logits(kind: mx.Dtype, penalty: float) -> None:
    settings = SamplingSettings(seed=0, repetition_penalty=penalty, presence_penalty=-2.0, frequency_penalty=2.0)
    logits = mx.array([[0.0, 50.0, -50.0, *[1.0] * (VOCABULARY - 3)]], dtype=kind)
    after = Penalties(settings, prompt=[0, 1, 2], answer=[1], vocab_size=VOCABULARY)(mx.array([1]), logits)
    assert bool(mx.isfinite(after).all())
    assert bool(mx.isfinite(after - mx.logsumexp(after.astype(mx.float32), axis=-1, keepdims=True)).all())


@pytest.mark.parametrize("kind", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("value", [1e5, 1e39, -1e39, 1e300, -1e300])
def test_the_largest_biases_leave_finite_logits_and_decide(kind: mx.Dtype, value: float) -> None:
    after = bias_processor({2: value, 3: value})(mx.array([0]), mx.full((1, 5), 40.0, dtype=kind))
    assert bool(mx.isfinite(after).all())
    assert int(mx.argmax(after)) == (2 if value > 0 else 0)


def test_a_banned_token_has_a_logprob_that_json_can_say() -> None:
    least = -mx.finfo(mx.float32).max
    assert read_likely(likely(mx.array([0.0, -math.inf]), mx.array(1), 2)) == [(1, least), (0, 0.0), (1, least)]


def test_logprobs_are_those_of_the_chosen_and_of_the_best() -> None:
    logits = ladder()[0] + 3.5
    found = read_likely(likely(logits, mx.array(4), 2))
    assert [id for id, _ in found] == [4, 0, 1]
    for id, value in found:
        assert value == pytest.approx(-(id + 1) * math.log(2), abs=1e-3)


def test_what_the_client_leaves_open_comes_from_the_model_and_then_from_the_protocol() -> None:
    defaults = SamplingDefaults(temperature=0.3, top_k=40)
    resolved = resolve(Sampling(top_k=5, seed=0), defaults, seed=99)
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.seed) == (0.3, 5, 1.0, 0)
    assert resolve(Sampling(), SamplingDefaults(), seed=99).temperature == 0.7
    assert resolve(Sampling(), SamplingDefaults(), seed=99).seed == 99
