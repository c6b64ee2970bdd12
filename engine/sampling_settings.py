"""What a request's sampling comes to once the model's defaults are known. A value; no arrays, no mlx."""

from __future__ import annotations

from dataclasses import dataclass

from omlxd.engine.api import Sampling
from omlxd.engine.model import SamplingDefaults

DEFAULT_TEMPERATURE = 0.7
XTC_THRESHOLD = 0.1


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """What `Sampling` and the model's defaults come to: nothing is None any more. `temperature` 0 is greedy."""

    seed: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = XTC_THRESHOLD
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


def resolve(sampling: Sampling, defaults: SamplingDefaults, *, seed: int) -> SamplingSettings:
    """The client's wish, else the model's generation_config, else the protocol's default."""

    def first(*values: float | None) -> float:
        return next(value for value in values if value is not None)

    return SamplingSettings(
        seed=sampling.seed if sampling.seed is not None else seed,
        temperature=first(sampling.temperature, defaults.temperature, DEFAULT_TEMPERATURE),
        top_p=first(sampling.top_p, defaults.top_p, 1.0),
        top_k=int(first(sampling.top_k, defaults.top_k, 0)),
        min_p=first(sampling.min_p, defaults.min_p, 0.0),
        xtc_probability=first(sampling.xtc_probability, 0.0),
        xtc_threshold=first(sampling.xtc_threshold, XTC_THRESHOLD),
        repetition_penalty=first(sampling.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=first(sampling.presence_penalty, 0.0),
        frequency_penalty=first(sampling.frequency_penalty, 0.0),
    )
