"""What the engine relies on in mlx-vlm's vision models, stated so that a release that changes it fails here.

Measured with mlx-vlm 0.7.10. Two findings shape the engine. Positions: a Qwen model computes the positions of every
call from state it keeps on itself, unless it is given exactly as many as the call has tokens; then it neither reads nor
writes that state. Gemma 3: the mask that `get_input_embeddings` returns is ignored by the language model, so a plain
mlx-vlm run attends causally inside a picture, and a prompt may be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as lm_cache
import mlx_vlm.models.cache as vlm_cache
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.generate import PromptProcessingBatch
from mlx_vlm.utils import SAFETENSORS_DTYPE_FALLBACKS, prepare_inputs

from omlxd.engine.api import LoadOptions, Unsupported
from omlxd.engine.catalog import Catalog, Root
from omlxd.engine.loader import load as load_model
from omlxd.engine.weights import UNREADABLE
from tests.models import WINDOW
from tests.vision_models import DEEP, FAMILIES, Message, Seeing, cold_run, ids_of, inputs_of, load, picture, user, write

NOISE = 1e-4
MROPE = {"qwen2_vl", "qwen2_5_vl"}
TWO = [user("first ", None, " then ", None, ". So?")]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def seeing(family: str, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return load(write(family, tmp_path_factory.mktemp(family)))


def _two() -> list[Any]:
    return [picture(1, (140, 84)), picture(2, (56, 84))]


@dataclass(frozen=True, slots=True)
class Seen:
    """A conversation as the language model takes it. `positions` are (3, 1, length), or None where RoPE counts."""

    ids: mx.array
    embeddings: mx.array
    positions: mx.array | None
    delta: int


def _see(seeing: Seeing, messages: Sequence[Message], images: Sequence[Any]) -> Seen:
    inputs = inputs_of(seeing.processor, messages, images)
    ids, pixels = inputs.pop("input_ids"), inputs.pop("pixel_values", None)
    found = seeing.model.get_input_embeddings(ids, pixels, mask=inputs.pop("attention_mask"), **inputs)
    if found.rope_deltas is None:
        return Seen(ids, found.inputs_embeds, None, 0)
    positions = found.position_ids
    if positions.ndim == 2:  # a conversation without pictures: the three axes agree
        positions = mx.broadcast_to(positions[None], (3, *positions.shape))
    return Seen(ids, found.inputs_embeds, positions, int(found.rope_deltas.item()))


def _caches(seeing: Seeing) -> list[Any]:
    """mlx-lm's caches in the places where the model would make mlx-vlm's."""
    return [
        lm_cache.RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
        if isinstance(cache, vlm_cache.RotatingKVCache)
        else lm_cache.KVCache()
        for cache in vlm_cache.make_prompt_cache(seeing.model.language_model)
    ]


def _at(seen: Seen, start: int, stop: int) -> dict[str, mx.array]:
    return {} if seen.positions is None else {"position_ids": seen.positions[..., start:stop]}


def _prefill(seeing: Seeing, seen: Seen, cuts: Sequence[int] = (), caches: list[Any] | None = None) -> mx.array:
    """The logits (vocabulary,) after the prompt, run in pieces that end at `cuts`."""
    caches = _caches(seeing) if caches is None else caches
    length = seen.ids.shape[1]
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        output = seeing.model.language_model(
            seen.ids[:, start:stop],
            inputs_embeds=seen.embeddings[:, start:stop],
            cache=caches,
            **_at(seen, start, stop),
        )
        mx.eval([cache.state for cache in caches])
    return output.logits[0, -1]


def _logprobs(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _places(ids: mx.array, family: str) -> list[int]:
    """Where in the ids (1, length) a row of a picture's features stands."""
    return [int(place) for place in np.flatnonzero(np.array(ids)[0] == FAMILIES[family].picture_token_id)]


def _apart(one: mx.array, other: mx.array) -> float:
    return float(mx.abs(one - other).max())


# ---------------------------------------------------------------------------------------------------------------------
# Embeddings


def test_embeddings_are_one_row_per_token_and_text_has_the_models_own(seeing: Seeing, family: str) -> None:
    seen = _see(seeing, TWO, _two())
    language = seeing.model.language_model
    words = language.embed_tokens if family in ("smolvlm", "idefics3") else language.model.embed_tokens
    assert seen.embeddings.shape == (1, seen.ids.shape[1], 64)
    moved = np.array(mx.abs(seen.embeddings - words(seen.ids))[0].max(axis=-1))
    assert [int(place) for place in np.flatnonzero(moved)] == _places(seen.ids, family)


def test_embeddings_of_a_later_picture_do_not_depend_on_an_earlier_one(seeing: Seeing, family: str) -> None:
    first, second = _two()
    both = _see(seeing, TWO, [first, second])
    alone = _see(seeing, [user(None)], [second])
    tokens = _places(alone.ids, family)
    last = _places(both.ids, family)[-len(tokens) :]
    assert _apart(both.embeddings[:, mx.array(last)], alone.embeddings[:, mx.array(tokens)]) < NOISE


def test_features_computed_before_stand_in_for_the_tower(seeing: Seeing, family: str) -> None:
    """`cached_image_features` take the place of what the projector returns, row for row, in the ids' order."""
    inputs = inputs_of(seeing.processor, TWO, _two())
    ids, pixels, mask = (inputs.pop(name) for name in ("input_ids", "pixel_values", "attention_mask"))
    plain = seeing.model.get_input_embeddings(ids, pixels, mask=mask, **inputs).inputs_embeds
    rows = plain[0, mx.array(_places(ids, family))]
    if family == "gemma3":
        rows = rows * 64**0.5  # it scales them down, and the language model up again
    features = rows[None] if family in ("gemma3", "llava") else rows
    again = seeing.model.get_input_embeddings(ids, pixels, mask=mask, cached_image_features=features, **inputs)
    assert _apart(again.inputs_embeds, plain) < NOISE


def test_only_qwens_give_positions(seeing: Seeing, family: str) -> None:
    seen = _see(seeing, TWO, _two())
    if family not in MROPE:
        assert seen.positions is None
        return
    assert seen.positions is not None
    assert seen.positions.shape == (3, 1, seen.ids.shape[1])
    # 140x84 is five tokens by three, 56x84 two by three: each takes as many positions as its longer side.
    assert seen.delta == (5 - 15) + (3 - 6)
    assert int(seen.positions.max()) + 1 - seen.ids.shape[1] == seen.delta


# ---------------------------------------------------------------------------------------------------------------------
# The language model


def test_a_run_over_embeddings_is_the_plain_run(seeing: Seeing) -> None:
    _, plain = cold_run(seeing, TWO, _two(), 1)
    assert _apart(_logprobs(_prefill(seeing, _see(seeing, TWO, _two()))), plain[0]) < NOISE


@pytest.mark.parametrize("size", [1, 7, 16, 33])
def test_a_prompt_may_be_cut_anywhere(seeing: Seeing, size: int) -> None:
    """In the middle of a picture, too: no family attends forwards, not even Gemma 3 (see the module)."""
    seen = _see(seeing, TWO, _two())
    whole = _prefill(seeing, seen)
    assert _apart(_prefill(seeing, seen, range(size, seen.ids.shape[1], size)), whole) < NOISE


def test_gemmas_language_model_ignores_the_mask_of_its_embeddings(tmp_path: Any) -> None:
    gemma = load(write("gemma3", tmp_path))
    seen = _see(gemma, TWO, _two())
    plain = _prefill(gemma, seen)
    mask = mx.zeros((1, 1, seen.ids.shape[1], seen.ids.shape[1]))
    masked = gemma.model.language_model(
        seen.ids, inputs_embeds=seen.embeddings, cache=_caches(gemma), attention_mask_4d=mask
    )
    assert _apart(masked.logits[0, -1], plain) == 0


def test_the_kinds_of_caches_are_full_attention_and_gemmas_windows(seeing: Seeing, family: str) -> None:
    caches = vlm_cache.make_prompt_cache(seeing.model.language_model)
    kinds = [type(cache) for cache in caches]
    if family == "gemma3":
        assert kinds == [vlm_cache.RotatingKVCache, vlm_cache.KVCache]
        assert (caches[0].max_size, caches[0].keep) == (WINDOW, 0)
    else:  # mlx-vlm makes these itself for a model that has no `make_cache`
        assert kinds == [vlm_cache.KVCache] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Positions and state


@pytest.mark.parametrize("name", sorted(MROPE))
def test_positions_that_are_given_need_no_state_and_leave_none(name: str, tmp_path: Any) -> None:
    qwen = load(write(name, tmp_path))
    language = qwen.model.language_model
    seen = _see(qwen, TWO, _two())
    clean = _prefill(qwen, seen)
    foreign = mx.array([[-17]]), mx.full((3, 1, 400), 5)
    language._rope_deltas, language._position_ids = foreign
    assert _apart(_prefill(qwen, seen, [9, 20]), clean) < NOISE
    assert (language._rope_deltas, language._position_ids) == foreign


@pytest.mark.parametrize("name", sorted(MROPE))
def test_without_positions_a_call_goes_by_what_the_last_request_left(name: str, tmp_path: Any) -> None:
    """Why the engine gives them with every call (PC-13's kind): this is upstream's behaviour, not ours."""
    qwen = load(write(name, tmp_path))
    seen = _see(qwen, [user("hello")], [])
    clean = _prefill(qwen, seen)
    cold_run(qwen, TWO, _two(), 1)
    caches = _caches(qwen)
    _prefill(qwen, seen, caches=caches)
    step = qwen.model.language_model(mx.array([[7]]), cache=caches).logits[0, -1]
    length = seen.ids.shape[1]
    again = _caches(qwen)
    assert _apart(_prefill(qwen, seen, caches=again), clean) < NOISE
    right = qwen.model.language_model(mx.array([[7]]), cache=again, position_ids=mx.full((3, 1, 1), length))
    assert _apart(step, right.logits[0, -1]) > 100 * NOISE


class _Decoding(Module):
    """A vision model's language model as mlx-lm's batches call it; each row's own delta goes with every step."""

    def __init__(self, seeing: Seeing, deltas: Sequence[int] | None) -> None:
        super().__init__()
        self._language = seeing.model.language_model
        self._deltas = deltas

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        if self._deltas is None:
            return self._language(tokens, cache=cache).logits
        starts = mx.array(cache[0].offset) + mx.array(list(self._deltas))
        positions = starts[:, None] + mx.arange(tokens.shape[1])[None]
        return self._language(
            tokens, cache=cache, position_ids=mx.broadcast_to(positions[None], (3, *positions.shape))
        ).logits


def test_rows_of_text_and_of_other_pictures_decode_together_on_mlx_lms_caches(seeing: Seeing, family: str) -> None:
    asks: list[tuple[list[Message], list[Any]]] = [
        (TWO, _two()),
        ([user("hello")], []),
        ([user(None, "?")], [picture("red", (84, 28))]),
    ]
    seen = [_see(seeing, messages, images) for messages, images in asks]
    rows = []
    for one in seen:
        caches, length = _caches(seeing), one.ids.shape[1]
        rest = Seen(one.ids[:, : length - 1], one.embeddings[:, : length - 1], one.positions, one.delta)
        _prefill(seeing, rest, caches=caches)
        rows.append(caches)
    model = _Decoding(seeing, [one.delta for one in seen] if family in MROPE else None)
    prompts = PromptProcessingBatch(model, list(range(3)), rows, max_tokens=[6] * 3)
    running = prompts.generate([[int(np.array(one.ids)[0, -1])] for one in seen])
    answers: list[list[int]] = [[], [], []]
    steps: list[list[mx.array]] = [[], [], []]
    for _ in range(6):
        for row in running.next():
            answers[row.uid].append(row.token)
            steps[row.uid].append(row.logprobs)
    for row, (messages, images) in enumerate(asks):
        ids, logprobs = cold_run(seeing, messages, images, 6)
        assert answers[row] == ids
        assert _apart(mx.stack(steps[row]), logprobs) < 10 * NOISE


# ---------------------------------------------------------------------------------------------------------------------
# Processors


def test_llavas_processor_takes_nothing_but_text_and_pictures(tmp_path: Any) -> None:
    """mlx-vlm's own `prepare_inputs` passes `padding`, which transformers' image processor refuses."""
    llava = load(write("llava", tmp_path))
    with pytest.raises(ValueError, match="padding"):
        prepare_inputs(llava.processor, images=[picture(1)], prompts="<image>?")


def test_a_processor_expands_each_placeholder_to_its_pictures_tokens(seeing: Seeing, family: str) -> None:
    tokens = ids_of(seeing.processor, TWO, _two()).count(FAMILIES[family].picture_token_id)
    tiles = 4 * ((2 * 2 + 1) + (2 * 2 + 1))
    assert tokens == {"qwen2_vl": 15 + 6, "qwen2_5_vl": 15 + 6, "gemma3": 18, "llava": 18}.get(family, tiles)


def test_a_family_whose_features_go_into_further_layers_is_refused_at_load(tmp_path: Path) -> None:
    """Qwen3-VL, which mlx-vlm runs: what its embeddings come with would be lost."""
    folder = write(DEEP, tmp_path / "deep")
    assert len(cold_run(load(folder), TWO, _two(), 2)[0]) == 2
    (entry,) = Catalog([Root(folder)]).scan()
    with pytest.raises(Unsupported, match="deepstack_visual_embeds, visual_pos_masks, which is not passed on yet"):
        load_model(entry, LoadOptions(), progress=lambda _: None)


def test_mlx_vlm_writes_into_headers_for_no_type_but_one_that_mlx_reads() -> None:
    """It is read before that, so no file is opened to write: test_catalog.py loads a file of every type."""
    assert SAFETENSORS_DTYPE_FALLBACKS.keys() == {"F8_E8M0"}
    assert "F8_E8M0" not in UNREADABLE
