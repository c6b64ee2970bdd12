"""Fill-in-the-middle asks in each family's own words, ends at its own tokens, and follows a typist."""

from __future__ import annotations

import asyncio
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omlxd.cache.hot import HotTier
from omlxd.cache.layouts import ModelLayout
from omlxd.cache.prefix import PrefixCache
from omlxd.engine.api import Cancelled, GenerateRequest, Sampling, Stopping, TextPrompt, Unsupported
from omlxd.engine.job import make_job
from omlxd.engine.model import LoadedModel, ModelFacts
from omlxd.engine.prefill import new_caches
from omlxd.engine.preparing import Preparer
from tests.engine.running import Running, engine
from tests.golden.script import Script, family_tokenizer
from tests.models import IM_END, build

FAMILIES = {
    "Qwen2.5-Coder": (
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"],
        "{0}a{1}b{2}",
    ),
    "StarCoder": (["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"], "{0}a{1}b{2}"),
    "DeepSeek-Coder": (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "{0}a{1}b{2}"),
    "CodeLlama": (["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], "{0}a{1}b{2}"),
    "Codestral": (["[PREFIX]", "[SUFFIX]"], "{1}b{0}a"),
}


def tokenizer(family: str) -> Any:
    tokens = FAMILIES[family][0] if family in FAMILIES else []
    with tempfile.TemporaryDirectory() as folder:
        return family_tokenizer(Path(folder), dict.fromkeys(tokens, True), (), "")


def facts(own: Any) -> ModelFacts:
    return ModelFacts("coder", Path("/nowhere"), 4096, len(own), frozenset({IM_END}), False, 0)


def request(prefix: str, suffix: str, **stopping: Any) -> GenerateRequest:
    return GenerateRequest("coder", TextPrompt(prefix, suffix), Sampling(temperature=0), Stopping(**stopping))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_is_in_the_family_s_words(family: str) -> None:
    own = tokenizer(family)
    tokens, shape = FAMILIES[family]
    prepared = Preparer(own, facts(own)).prepare(request("a", "b"))
    assert own.decode(list(prepared.token_ids)) == shape.format(*tokens)


def test_a_model_without_such_tokens_says_so() -> None:
    own = tokenizer("none")
    with pytest.raises(Unsupported) as refused:
        Preparer(own, facts(own)).prepare(request("a", "b"))
    assert refused.value.fields["what"] == "suffix"


@pytest.mark.parametrize("end", ["<|fim_pad|>", "<|file_sep|>", "<|fim_prefix|>"])
def test_a_token_of_the_family_ends_the_middle_and_is_not_in_it(end: str) -> None:
    own = tokenizer("Qwen2.5-Coder")
    said = [*b"x + 1", own.get_vocab()[end], *b" never"]

    async def main() -> tuple[str, str]:
        model = LoadedModel(Script(said, len(own)), own, facts(own))
        async with engine(model) as running:
            asked = request("def f(x): return ", "\n")
            prepared = await running.prepare(asked)
            model.model.prompt_tokens = len(prepared.token_ids)
            job = make_job(asked, prepared, running.facts, id="one", arrived=time.monotonic())
            result = await Running(running, job).result()
            return result.text, result.finish_reason

    assert asyncio.run(main()) == ("x + 1", "stop")


def test_fifty_keystrokes_each_cancel_the_one_before_and_reuse_what_it_read() -> None:
    """Every request but the last is cancelled, at any point of its life; each finds the prefix of those before it."""
    own = tokenizer("Qwen2.5-Coder")
    llama = build("llama", vocab_size=len(own), context=4096)
    cache = PrefixCache(root=b"fim", layout=ModelLayout(new_caches(llama)), tier=HotTier(1 << 30), block_size=16)
    model = replace(LoadedModel(llama, own, facts(own)), cache=cache)
    above = "def area(width, height):\n    # the area of a rectangle\n" * 4
    typed = "    return width * height  # in square units, always"[:50]
    assert len(typed) == 50

    async def main() -> None:
        async with engine(model, prefill_chunk=64) as running:
            ends: list[Running] = []
            for stroke in range(1, len(typed) + 1):
                length = 5 if stroke == len(typed) else 2000  # none but the last comes to an end by itself
                suffix = "\n\nprint(area(2, 3))\n"
                asked = request(above + typed[:stroke], suffix, max_tokens=length, ignore_eos=True)
                asked = replace(asked, stream=True)
                prepared = await running.prepare(asked)
                job = make_job(asked, prepared, running.facts, id=f"k{stroke}", arrived=time.monotonic())
                current = Running(running, job)
                if stroke % 3 == 0:
                    await current.first_token()
                if ends:
                    ends[-1].stream.cancel()
                ends.append(current)
            last = await ends[-1].result()
            others = await asyncio.gather(*(each.stream.result() for each in ends[:-1]), return_exceptions=True)
            assert all(isinstance(end, Cancelled) for end in others)
            assert last.usage.completion_tokens == 5
            assert last.usage.cached_tokens >= (len(above) + 40) // 16 * 16

    asyncio.run(main())
    cache.check()
