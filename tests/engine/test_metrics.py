"""What an engine counts: every token, wait and rate once, and nothing that did not happen."""

from __future__ import annotations

import asyncio

import pytest

from omlxd.engine.api import Cancelled, GenerationResult, ModelMetrics, Timings, Usage
from omlxd.engine.metrics import Meter, joined
from omlxd.engine.request import Request, State
from tests.engine.running import Running, cached, engine, job, tokenizer
from tests.engine.test_prefix_reuse import tokens


class Clock:
    """Moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def request(clock: Clock, prompt_tokens: int = 3) -> Request:
    return Request(job(tokens(prompt_tokens), arrived=clock()), tokenizer(), clock)


def spread(metrics: ModelMetrics, name: str) -> dict[float, int]:
    """The histogram's filled buckets, by their upper bound."""
    histogram = metrics.histograms[name]
    bounds = [*histogram.bounds, float("inf")]
    return {bound: count for bound, count in zip(bounds, histogram.counts, strict=True) if count}


def ended(metrics: ModelMetrics) -> list[int]:
    return [metrics.counters[f"requests_{how}"] for how in ("finished", "cancelled", "failed")]


def test_the_first_token_is_timed_from_the_requests_arrival_and_the_others_from_each_other() -> None:
    clock = Clock()
    meter, one = Meter(clock), request(clock)
    for at in (100.04, 100.055, 100.08):
        clock.now = at
        meter.stepped(1)
        meter.drew(one)
    metrics = meter.read()
    assert spread(metrics, "ttft_s") == {0.05: 1}
    assert spread(metrics, "itl_s") == {0.02: 1, 0.03: 1}
    assert metrics.histograms["itl_s"].sum == pytest.approx(0.04)
    assert metrics.counters["generated_tokens"] == 3


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    meter = Meter(Clock())
    for rows in (1, 2, 3, 128, 129):
        meter.stepped(rows)
    assert spread(meter.read(), "batch_size") == {1: 1, 2: 1, 4: 1, 128: 1, float("inf"): 1}


def test_a_reading_does_not_change_any_more() -> None:
    meter = Meter(Clock())
    before = meter.read()
    meter.stepped(4)
    assert before.counters["generated_tokens"] == 0
    assert before.histograms["batch_size"].count == 0
    assert joined(meter.read(), meter.read()).histograms["batch_size"].sum == 8


def test_an_end_counts_as_what_it_was() -> None:
    clock = Clock()
    meter = Meter(clock)
    result = GenerationResult("m", "", "stop", Usage(), Timings(tokens_per_s=40.0))
    meter.ended(request(clock), result)
    meter.ended(request(clock), Cancelled())
    metrics = meter.read()
    assert ended(metrics) == [1, 1, 0]
    assert spread(metrics, "decode_tokens_per_s") == {50: 1}


def test_an_engines_numbers_are_those_of_its_answers() -> None:
    """Two prompts of 40 tokens, the second with 32 in common; six tokens each; one request is cancelled."""
    prompts = [tokens(40), [*tokens(32), *tokens(8, 1)]]

    async def main() -> tuple[list[GenerationResult], ModelMetrics]:
        async with engine(cached("llama")) as running:
            results = [await Running(running, job(prompt, 6)).result() for prompt in prompts]
            left = Running(running, job(tokens(10, 2), 500, stream=True))
            await left.first_token()
            left.stream.cancel()
            with pytest.raises(Cancelled):
                await left.result()
            return results, running.metrics

    results, metrics = asyncio.run(main())
    counters = metrics.counters
    assert ended(metrics) == [2, 1, 0]
    assert counters["failed_steps"] == 0
    assert counters["prompt_tokens"] == 40 + 40 + 10
    assert counters["cached_tokens"] == sum(result.usage.cached_tokens for result in results) == 32
    assert counters["prefill_tokens"] == 40 + 8 + 10
    first_tokens = 3  # drawn at the prompts' ends, in no step
    assert counters["generated_tokens"] == metrics.histograms["batch_size"].sum + first_tokens
    assert metrics.histograms["ttft_s"].count == metrics.histograms["queue_s"].count == 3
    assert metrics.histograms["hit_tokens"].sum == 32
    assert metrics.histograms["itl_s"].count == counters["generated_tokens"] - 3
    assert metrics.histograms["decode_tokens_per_s"].count == 2


def test_what_a_preempted_row_waited_is_time_between_its_tokens() -> None:
    async def main() -> ModelMetrics:
        async with engine(cached("llama"), max_batch=1) as running:
            row = Running(running, job(tokens(30), 60, stream=True, batch_priority=True))
            await row.first_token()
            await Running(running, job(tokens(20, 9), 5)).result()
            await row.result()
            return running.metrics

    metrics = asyncio.run(main())
    assert metrics.counters["requests_preempted"] == 1
    assert metrics.histograms["ttft_s"].count == metrics.histograms["queue_s"].count == 2
    assert metrics.histograms["itl_s"].count == 60 - 1 + 5 - 1
    assert metrics.counters["prompt_tokens"] == 30 + 20


def test_a_request_in_the_line_shows_what_it_waits_for() -> None:
    clock = Clock()
    waiting = request(clock)
    assert (waiting.info().state, waiting.info().reason) == ("QUEUED", "waits for a row")
    waiting.enter(State.HELD, "r1 computes its first 64 tokens")
    waiting.enter(State.QUEUED)
    assert waiting.info().reason == "waits for a row"
    waiting.enter(State.PREFILL)
    assert waiting.info().reason is None
