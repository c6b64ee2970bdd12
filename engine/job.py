"""Jobs: what an engine is asked to do, made of a client's request, its prompt's token ids and the model's facts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omlxd.engine.answer import PLAIN, Form
from omlxd.engine.api import ContextTooLong, GenerateRequest, InvalidParams
from omlxd.engine.model import ModelFacts
from omlxd.engine.sampling_settings import SamplingSettings, resolve

if TYPE_CHECKING:  # they load mlx, which the event loop's side does without until a model is wanted
    from omlxd.engine.preparing import Prepared
    from omlxd.engine.steering import Course
    from omlxd.engine.vision_inputs import PictureInput

SEEDS = 1 << 53  # a seed drawn for a client survives JSON readers that keep numbers as doubles


@dataclass(frozen=True, slots=True)
class Job:
    """What an engine is asked to do: a prompt in token ids and everything that shapes the answer."""

    id: str
    model: str
    prompt: Sequence[int]
    sampling: SamplingSettings
    logit_bias: dict[int, float]
    max_tokens: int
    stop: Sequence[str]
    stop_ids: frozenset[int]
    logprobs: int
    stream: bool
    progress: bool
    batch_priority: bool
    use_cache: bool
    arrived: float
    boundaries: Sequence[int] = ()  # where the prompt's messages end, in tokens
    warm: bool = False  # compute and keep the prompt, draw nothing
    form: Form = PLAIN
    course: Course | None = None
    apart: bytes = b""  # of a session whose blocks are its own, see `cache.keys.apart`
    pictures: Sequence[PictureInput] = ()  # in order; held until the end, for a request that must begin again


def make_job(
    request: GenerateRequest,
    prepared: Prepared,
    facts: ModelFacts,
    *,
    id: str,
    arrived: float,
    boundaries: Sequence[int] = (),
    apart: bytes = b"",
) -> Job:
    """`arrived` is on the engine's clock. Raises ContextTooLong, InvalidParams."""
    prompt = prepared.token_ids
    stopping = request.stopping
    settings = resolve(request.sampling, facts.defaults, seed=secrets.randbelow(SEEDS))
    return Job(
        id=id,
        model=request.model,
        prompt=prompt,
        sampling=settings,
        logit_bias=_bias(request, facts),
        max_tokens=_room(len(prompt), stopping.max_tokens, facts),
        stop=stopping.stop,
        stop_ids=frozenset(stopping.stop_token_ids)
        | prepared.stop_ids
        | (frozenset() if stopping.ignore_eos else facts.eos_token_ids | prepared.end_ids),
        logprobs=request.logprobs,
        stream=request.stream,
        progress=request.progress,
        batch_priority=request.priority == "batch",
        use_cache=request.cache,
        arrived=arrived,
        boundaries=boundaries,
        warm=request.warm,
        form=prepared.form,
        course=prepared.course,
        apart=apart,
        pictures=prepared.pictures,
    )


def _room(prompt_tokens: int, max_tokens: int, facts: ModelFacts) -> int:
    """`max_tokens`, cut to what the context leaves."""
    if facts.context_tokens is None:
        return max_tokens
    room = facts.context_tokens - prompt_tokens
    if room < 1:
        raise ContextTooLong(prompt_tokens, facts.context_tokens)
    return min(max_tokens, room)


def _bias(request: GenerateRequest, facts: ModelFacts) -> dict[int, float]:
    bias = dict(request.sampling.logit_bias)
    for id in bias:
        if not 0 <= id < facts.vocab_size:
            reason = f"token {id} is outside this model's vocabulary, 0 to {facts.vocab_size - 1}"
            raise InvalidParams("logit_bias", reason)
    return bias | {id: float("-inf") for id in facts.defaults.suppress_tokens}
