"""Runs a real engine on a tiny vision model inside a test, and compares its answers with mlx-vlm's own generator."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from omlxd.cache.hot import HotTier
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from omlxd.engine.api import ChatPrompt, GenerateRequest, GenerationResult, LoadOptions, Sampling, Stopping
from omlxd.engine.catalog import Catalog, Root
from omlxd.engine.engine import Engine
from omlxd.engine.images import Picture, digest_of
from omlxd.engine.job import Job, make_job
from omlxd.engine.loader import load
from omlxd.engine.model import LoadedModel
from omlxd.engine.prefill import new_caches
from omlxd.engine.preparing import Preparer
from tests import vision_models
from tests.engine.running import Running
from tests.vision_models import Seeing, cold_run

Part = str | Image.Image
_ids = itertools.count()


@cache
def folder(family: str) -> Path:
    return vision_models.write(family, Path(tempfile.mkdtemp()) / family)


@cache
def oracle(family: str) -> Seeing:
    """A model of its own: nothing that the oracle leaves on it can help or harm the engine's."""
    return vision_models.load(folder(family))


def loaded(family: str, *, feature_bytes: int = 1 << 20) -> LoadedModel:
    """The model as the loader hands it over; without EOS, so that lengths are the test's."""
    (entry,) = Catalog([Root(folder(family))]).scan()
    model = load(entry, LoadOptions(), progress=lambda _: None, feature_bytes=feature_bytes)
    return replace(model, facts=replace(model.facts, eos_token_ids=frozenset()))


def cached(family: str, *, block_size: int = 16, feature_bytes: int = 1 << 20) -> LoadedModel:
    """`loaded`, with a prefix cache of its own."""
    plain = loaded(family, feature_bytes=feature_bytes)
    layout = ModelLayout(new_caches(plain.model))
    prefixes = PrefixCache(root=family.encode(), layout=layout, tier=HotTier(1 << 30), block_size=block_size)
    return replace(plain, cache=prefixes)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: texts and pictures in order."""

    role: str
    parts: Sequence[Part]

    @property
    def images(self) -> list[Image.Image]:
        return [part for part in self.parts if isinstance(part, Image.Image)]


def says(*parts: Part) -> Turn:
    return Turn("user", parts)


def answers(text: str) -> Turn:
    return Turn("assistant", [text])


def chat(model: LoadedModel, turns: Sequence[Turn], max_tokens: int = 8, **changes: Any) -> Job:
    """A greedy request for the answer to a conversation, prepared as the tokenizer thread would."""
    messages = [{"role": turn.role, "content": _content(turn)} for turn in turns]
    request = GenerateRequest(
        model.facts.name,
        ChatPrompt(messages),
        sampling=Sampling(temperature=0, seed=0),
        stopping=Stopping(max_tokens=max_tokens, ignore_eos=True),
        logprobs=20,
    )
    pictures = [Picture(digest_of(image), image) for turn in turns for image in turn.images]
    apart = {each.digest: model.sight.apart(each) for each in pictures} if model.sight and model.sight.mark else {}
    prepared = Preparer(model.tokenizer, model.facts, model.sight).prepare(request, pictures, apart)
    job = make_job(request, prepared, model.facts, id=f"v{next(_ids)}", arrived=time.monotonic())
    return replace(job, **changes)


def _content(turn: Turn) -> str | list[dict[str, Any]]:
    if not turn.images:
        return "".join(part for part in turn.parts if isinstance(part, str))
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": {"url": "x"}}
        for part in turn.parts
    ]


async def ask(running: Engine, model: LoadedModel, turns: Sequence[Turn], **changes: Any) -> GenerationResult:
    asked = chat(model, turns, **changes)
    with running.holding(asked.pictures):
        return await Running(running, asked).result()


def assert_is_mlx_vlms(family: str, turns: Sequence[Turn], result: GenerationResult) -> None:
    """Prompt and answer are mlx-vlm's, token for token; the twenty best log-probabilities of each step within 1e-3."""
    messages = [
        {"role": turn.role, "content": _parts(turn) if turn.images else "".join(map(str, turn.parts))} for turn in turns
    ]
    images = [image for turn in turns for image in turn.images]
    seeing = oracle(family)
    assert list(result.prompt_token_ids) == vision_models.ids_of(seeing.processor, messages, images)
    ids, logprobs = cold_run(seeing, messages, images, len(result.token_ids))
    cold = np.array(logprobs.astype(mx.float32))
    assert list(result.token_ids) == ids
    for step, entry in enumerate(result.logprobs or ()):
        seen = [entry, *entry.top]
        got = np.array([token.logprob for token in seen])
        assert np.abs(got - cold[step, [token.token_id for token in seen]]).max() <= 1e-3, f"step {step}"


def _parts(turn: Turn) -> list[dict[str, str]]:
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in turn.parts]
