"""The facts of a model that stand in its config files: context, end tokens, sampling defaults.

Called by the loader on the loader thread; pure but for reading generation_config.json. Names differ between
architectures and a text model may be nested in a multimodal one, so each fact is looked for under every name it has.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

from omlxd.engine.model import SamplingDefaults

_log = logging.getLogger(__name__)

_LARGEST = sys.float_info.max  # Python reads Infinity, NaN and integers of any length out of JSON
_MAX_POSITIONS = 2**40  # transformers writes 10**30 for "no limit"
GENERATION_CONFIG = "generation_config.json"
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "model_max_length")

Config = Mapping[str, object]


def generation_config(path: Path) -> Config | None:
    """The folder's generation_config; empty if it has none, None (with a warning in the log) if it is broken."""
    file = path / GENERATION_CONFIG
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s is ignored: %s", file, error)
        return None
    if isinstance(value, dict):
        return value
    _log.warning("%s is ignored: it is not a JSON object", file)
    return None


def context_tokens(config: Config) -> int | None:
    """How many positions the model has: what the config says, or what its rope scaling stretches it to if that is more.

    A scaled model's config gives either the stretched length or the original one, by the habits of its makers.
    """
    stated = [n for part in _parts(config) for n in _positive(part.get(key) for key in _CONTEXT_KEYS)]
    stretched = [n for part in _parts(config) for n in _stretched(part)]
    return max([stated[0], *stretched]) if stated else None


def vocabulary(config: Config, otherwise: int) -> int:
    """The width of the logits."""
    return next((n for part in _parts(config) for n in _positive([part.get("vocab_size")])), otherwise)


def end_tokens(*configs: Config) -> frozenset[int]:
    """Every id that config or generation_config names as ending a text, given as one id or as a list."""
    named = [part.get("eos_token_id") for config in configs for part in _parts(config)]
    return frozenset(n for value in named for n in (value if isinstance(value, list) else [value]) if _is_id(n))


def sampling_defaults(config: Config) -> SamplingDefaults:
    """What generation_config asks for; a value out of its range is ignored with a warning."""
    greedy = config.get("do_sample") is False
    top_k = _number(config, "top_k", lambda x: x >= 0 and x == int(x))
    suppress = config.get("suppress_tokens")
    return SamplingDefaults(
        temperature=0.0 if greedy else _number(config, "temperature", lambda x: x >= 0),
        top_p=_number(config, "top_p", lambda x: 0 < x <= 1),
        top_k=None if top_k is None else int(top_k),
        min_p=_number(config, "min_p", lambda x: 0 <= x <= 1),
        repetition_penalty=_number(config, "repetition_penalty", lambda x: x > 0),
        suppress_tokens=frozenset(n for n in suppress if _is_id(n)) if isinstance(suppress, list) else frozenset(),
    )


def _parts(config: Config) -> Iterator[Config]:
    yield config
    nested = config.get("text_config")
    if isinstance(nested, dict):
        yield nested


def _stretched(config: Config) -> Iterator[int]:
    for key in ("rope_scaling", "rope_parameters"):
        match config.get(key):
            case {"original_max_position_embeddings": int(original), "factor": int() | float() as factor}:
                if 0 < original < _MAX_POSITIONS and 0 < factor < _MAX_POSITIONS:
                    yield int(original * factor)


def _positive(values: Iterable[object]) -> Iterator[int]:
    return (n for n in values if isinstance(n, int) and 0 < n < _MAX_POSITIONS)


def _is_id(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _number(config: Config, key: str, accepts: Callable[[float], bool]) -> float | None:
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, (int, float)) and type(value) is not bool and abs(value) <= _LARGEST and accepts(value):
        return float(value)
    _log.warning("%s: %s = %r is ignored, it is out of range", GENERATION_CONFIG, key, value)
    return None
