"""What a loaded model is, as values: the model itself, its tokenizer and the facts read once from its folder.

Made by `engine/loader.py` on the loader thread and handed to one engine thread, which from then on owns the module.
Imports neither mlx nor mlx-lm, so that whoever only names these types pays nothing for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from omlxd.engine.estimator import UNMEASURED, Costs
from omlxd.engine.messages import PartsStyle

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from omlxd.cache.prefix import PrefixCache
    from omlxd.cache.ssd import ModelStore
    from omlxd.engine.vision_inputs import Sight
    from omlxd.engine.vision_prefill import PicturePrefills


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's generation_config asks for. None means that it says nothing.

    `temperature` is 0 (greedy) where the file says `do_sample: false`. `suppress_tokens` are ids never to be sampled.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    suppress_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine needs to know about a model beside its weights.

    `context_tokens` is the longest prompt plus answer that the positions allow, None when the config does not say.
    `vocab_size` is the width of the logits, which may be more than the tokenizer has entries. `eos_token_ids` joins
    those of the tokenizer, of generation_config and of config. `weight_bytes` is what the weights occupy in memory,
    after any cast. `parts` is how the chat template takes messages that show pictures.
    """

    name: str
    path: Path
    context_tokens: int | None
    vocab_size: int
    eos_token_ids: frozenset[int]
    has_chat_template: bool
    weight_bytes: int
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    parts: PartsStyle = PartsStyle.NEVER


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: every weight is evaluated, so the module may move to another thread once."""

    model: Module
    tokenizer: TokenizerWrapper
    facts: ModelFacts
    cache: PrefixCache | None = None
    store: ModelStore | None = None  # the cache's colder tier
    uncached: str | None = None  # why there is no cache
    costs: Costs = UNMEASURED
    sight: Sight | None = None  # for a model that takes pictures
    prefills: PicturePrefills | None = None  # and for every vision model
