"""Loading a vision model: mlx-vlm's model and processor, and whether they keep to what the engine relies on.

Runs on the loader thread and keeps no state. What a family does with pictures is found out here, once, by giving the
processor two of them and building the graphs of a run that is never computed. A family that needs more than embeddings
and positions for a picture, that must see a prompt in one piece, or that keeps something of a request on the model
object, is refused with that reason: the engine computes many requests on one model, in pieces.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_vlm.utils import load_model, load_processor
from PIL import Image

from omlxd.engine.api import InvalidParams, Unsupported
from omlxd.engine.catalog import CatalogEntry
from omlxd.engine.images import Picture
from omlxd.engine.picture_memory import Tower, tower_of
from omlxd.engine.prompt import TEMPLATE_FAILURES, rendered_ids
from omlxd.engine.vision_inputs import (
    GRID,
    PIXELS,
    ByGrid,
    ByPicture,
    ByTiles,
    Encode,
    PictureInput,
    Share,
    Sight,
    processed,
)
from omlxd.engine.vision_model import RowShift, VisionModel

# Of what mlx-vlm returns for a prompt, what the engine passes on. Its generator hands Gemma 3's mask to a language
# model that does not look at it, so pictures are seen causally there, and so they are here.
_PASSED_ON: Final = frozenset({"inputs_embeds", "position_ids", "rope_deltas"})
_NOT_LOOKED_AT: Final[Mapping[str, frozenset[str]]] = {"gemma3": frozenset({"attention_mask_4d"})}
_PROBES: Final = ((64, 64), (96, 64))  # pictures' sizes
# What stands before and behind each of them: all that might run together with what is written for one, on both sides.
_NEIGHBOURS: Final = (("", "", "", ""), (" ", "\n", "\n\n", "x"), ("x", " ", "\n", "\n\n"))

log = logging.getLogger(__name__)


def vision_model(folder: Path) -> VisionModel:
    """The model with lazy weights. Raises whatever mlx-vlm does for a config that fits no model."""
    vlm = load_model(folder, lazy=True)
    try:
        plain = vlm.get_input_embeddings(mx.array([[0]]))
        vlm.language_model  # noqa: B018  asked for here, to be refused here
    except AttributeError as error:
        raise _refused(vlm, f"mlx-vlm's model has no {error.name}") from None
    return VisionModel(vlm, counts_apart=plain.position_ids is not None)


def sight_of(entry: CatalogEntry, folder: Path, model: VisionModel, tokenizer: TokenizerWrapper) -> Sight | None:
    """How the model is given pictures; None if its chat template has no place for them.

    Raises Unsupported for a family whose pictures need what the engine does not do.
    """
    if not tokenizer.has_chat_template:
        return None
    try:
        none, one, two = (_rendered(tokenizer, pictures) for pictures in range(3))
    except TEMPLATE_FAILURES:
        return None  # it takes texts, and was given parts
    written = {text for text in tokenizer.get_added_vocab() if text in one and text not in none}
    if not written:
        return None
    processor = load_processor(
        folder, add_detokenizer=False, local_files_only=True, trust_remote_code=entry.remote_code
    )
    images = [Image.new("RGB", size, "gray") for size in _PROBES]
    token_id = _picture_token(model)
    sight = Sight(
        processor=processor,
        decode=partial(processor.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        share=_share(model, processor, one, two, images),
        token_id=token_id,
        # Texts that the processor would take for a picture: its token, and what the template writes for one.
        marks=sorted({str(tokenizer.convert_ids_to_tokens(token_id)), *written}),
        tower=_tower(folder, model),
        bos=tokenizer.bos_token,
        bos_id=tokenizer.bos_token_id,
    )
    pictures = [Picture(bytes([n]) * 32, image) for n, image in enumerate(images)]
    sight = replace(sight, mark=_mark(sight, tokenizer, written, two, pictures))
    apart = {} if sight.mark is None else {picture.digest: sight.apart(picture) for picture in pictures}
    ids, inputs = sight.prompt(two, pictures, apart, partial(_encoded, tokenizer))
    _check_run(model, ids, inputs)
    return sight


def _mark(
    sight: Sight, tokenizer: TokenizerWrapper, written: Iterable[str], two: str, pictures: Sequence[Picture]
) -> str | None:
    """What the processor replaces for each picture, of the texts that a template has `written`."""
    encode = partial(_encoded, tokenizer)
    for mark in sorted(written):
        if two.count(mark) == len(pictures) and _stands_for_one(replace(sight, mark=mark), mark, encode, two, pictures):
            return mark
    log.info("%s sees whole prompts, with every picture anew", type(sight.processor).__name__)
    return None


def _stands_for_one(sight: Sight, mark: str, encode: Encode, two: str, pictures: Sequence[Picture]) -> bool:
    """Whether prompts come out as the processor's own with what it writes for each alone in the mark's place."""
    whole = replace(sight, mark=None)
    try:
        apart = {picture.digest: sight.apart(picture) for picture in pictures}
        return all(each.num_tokens for each in apart.values()) and all(
            sight.prompt(text, pictures, apart, encode)[0] == whole.prompt(text, pictures, {}, encode)[0]
            for text in _with_neighbours(two.split(mark), mark)
        )
    except InvalidParams:
        return False  # it is not for a picture


def _encoded(tokenizer: TokenizerWrapper, text: str, begins: bool) -> list[int]:
    return rendered_ids(text, tokenizer, begins=begins)


def _with_neighbours(around: Sequence[str], mark: str) -> list[str]:
    first, between, last = around
    return [f"{first}{a}{mark}{b}{between}{c}{mark}{d}{last}" for a, b, c, d in _NEIGHBOURS]


def _rendered(tokenizer: TokenizerWrapper, pictures: int) -> str:
    """A conversation that shows so many pictures."""
    parts = [*({"type": "image"} for _ in range(pictures)), {"type": "text", "text": "x"}]
    messages = [{"role": "user", "content": parts}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _picture_token(model: VisionModel) -> int:
    """Families call it by one name or the other."""
    names = vars(model.vlm.config)
    found = next((names[name] for name in ("image_token_id", "image_token_index") if names.get(name) is not None), None)
    if type(found) is not int:
        raise _refused(model.vlm, "its config names no image_token_id and no image_token_index")
    return found


def _share(model: VisionModel, processor: Any, one: str, two: str, images: Sequence[Image.Image]) -> Share:
    tensors = processed(processor, two, images).tensors
    if PIXELS not in tensors:
        raise _refused(model.vlm, f"its processor makes {', '.join(sorted(tensors))} and no {PIXELS}")
    if GRID in tensors:
        return ByGrid()
    if all(tensor.shape[0] == len(images) for tensor in tensors.values()):
        return ByPicture()
    if tensors[PIXELS].ndim == 5 and tensors[PIXELS].shape[0] == 1:
        return ByTiles(processor, one)
    shapes = ", ".join(f"{name} {tensor.shape}" for name, tensor in sorted(tensors.items()))
    raise _refused(model.vlm, f"two pictures cannot be told apart in what its processor makes: {shapes}")


def _tower(folder: Path, model: VisionModel) -> Tower:
    config = json.loads((folder / "config.json").read_bytes())
    embedding = model.embed_text([0])
    gpu = mx.default_device() == mx.Device(mx.gpu)
    return tower_of(config, out=embedding.shape[-1], item_bytes=embedding.dtype.size, gpu=gpu)


def _check_run(model: VisionModel, ids: Sequence[int], inputs: Sequence[PictureInput]) -> None:
    """Builds a prompt's graphs as the engine will, and looks at what came of it."""
    vlm = model.vlm
    before = _remembered(vlm)
    for each in inputs:
        features = model.features(ids[each.span.start : each.span.stop], each.tensors).to_dict()
        given = {name for name, value in features.items() if value is not None}
        more = given - _PASSED_ON - _NOT_LOOKED_AT.get(vlm.config.model_type, frozenset())
        if more:
            raise _refused(vlm, f"its pictures come with {', '.join(sorted(more))}, which is not passed on yet")
        if _in_one_piece(vlm, features):
            raise _refused(vlm, "it must see a prompt with pictures in one piece")
    caches = model.make_cache()
    if model.counts_apart:
        _, shift = model.positions(ids, [each.tensors for each in inputs])
        caches.append(RowShift([shift]))
    model(mx.array([[0, 0]]), cache=caches, embeddings=model.embed_text([0, 0])[None])
    changed = sorted(name for name, value in _remembered(vlm).items() if before.get(name) is not value)
    if changed:
        raise _refused(vlm, f"it keeps a request's {', '.join(changed)} on the model")


def _in_one_piece(vlm: Any, features: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm's own generator would refuse to cut this prompt. Both are optional in its contract."""
    for module in (vlm, vlm.language_model):
        policy = getattr(module, "chunked_prefill_policy", None)
        if policy is not None:
            kwargs = {name: value for name, value in features.items() if name != "inputs_embeds"}
            return not policy(
                input_ids=None,
                inputs_embeds=features["inputs_embeds"],
                prompt_cache=None,
                draft_model=None,
                draft_kind=None,
                prefill_kwargs=kwargs,
            )
    return any(getattr(module, "no_chunked_prefill", False) for module in (vlm, vlm.language_model))


def _remembered(vlm: Any) -> dict[str, object]:
    """Everything that stands on the model and its language model besides weights and modules."""
    return {
        f"{where}{name}": value
        for where, module in (("", vlm), ("language_model.", vlm.language_model))
        for name, value in {**vars(module), **module}.items()
    }


def _refused(vlm: Any, reason: str) -> Unsupported:
    return Unsupported(f"model type {vlm.config.model_type!r}", f"{reason}; choose another vision model")
