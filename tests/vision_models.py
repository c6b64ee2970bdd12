"""Tiny random-weight vision-language models, their processors, pictures, and the oracle of a plain mlx-vlm run.

For tests of every room that needs a model that sees; the calling thread owns what it gets. Nothing is downloaded,
everything is seeded and fp32. A folder that `write` makes is opened by mlx-vlm's own `load`, without torch, torchvision
or a network: mlx-vlm has processors of its own for all of these, in numpy for Qwen's; for the others they use the image
processors that transformers 5 keeps in a Pillow variant.

The tokenizer is that of tests/models.py (a byte is a token) with the family's own special tokens in place of its first
pieces. No model ever says one of these: their rows of the head are zero, so an answer never holds a picture.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_vlm
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_vlm.generate.ar import generate_step
from mlx_vlm.utils import get_model_and_args, update_module_configs
from PIL import Image
from tokenizers import AddedToken

from tests.models import CONTEXT, END_OF_TEXT, FIRST_PIECE, IM_END, SPECIAL, VOCABULARY, WINDOW, byte_tokenizer

QWEN_UNIT = 28  # pixels along one side that become one token of Qwen's
PATCH = 7  # pixels along one side of a patch of the others
_CHAT_TEMPLATE = (
    "{%% for message in messages %%}<|im_start|>{{ message['role'] }}\n"
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'text' %%}{{ part['text'] }}{%% else %%}%s{%% endif %%}"
    "{%% endfor %%}{%% endif %%}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)


@dataclass(frozen=True, slots=True)
class TinyVision:
    """A family's config.json, what its processor reads, and how its template marks a picture.

    `specials` are its own special tokens, with ids from FIRST_PIECE on, in this order; `picture_token` is the one that
    stands in the ids for one row of a picture's features.
    """

    config: Mapping[str, Any]
    specials: Sequence[str]
    picture_token: str
    marker: str
    preprocessor: Mapping[str, Any]
    scale: float = 2.0
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    processor_config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def picture_token_id(self) -> int:
        return FIRST_PIECE + list(self.specials).index(self.picture_token)


_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
_ENDS = {"bos_token_id": END_OF_TEXT, "pad_token_id": END_OF_TEXT, "eos_token_id": IM_END}
_QWEN_SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _qwen(model_type: str, **vision: Any) -> TinyVision:
    start, end, image, video = range(FIRST_PIECE, FIRST_PIECE + 4)
    config = {
        "model_type": model_type,
        **_TEXT,
        **_ENDS,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},  # of a head's 16 dimensions, in pairs
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
        "vision_config": {
            "model_type": model_type,
            "depth": 2,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": QWEN_UNIT // 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
    }
    preprocessor = {
        "patch_size": QWEN_UNIT // 2,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": QWEN_UNIT**2,
        "max_pixels": 100 * QWEN_UNIT**2,
    }
    marker = "<|vision_start|><|image_pad|><|vision_end|>"
    return TinyVision(config, _QWEN_SPECIALS, "<|image_pad|>", marker, preprocessor)


_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_channels": 3,
    "patch_size": PATCH,
}


def _gemma() -> TinyVision:
    """Nine tokens a picture, six by six patches averaged two by two; every other layer sees a window of 16."""
    begin, soft, end = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
    side = 6 * PATCH
    text = {
        "model_type": "gemma3_text",
        **_TEXT,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "mm_tokens_per_image": 9,
    }
    config = {
        "model_type": "gemma3",
        **_ENDS,
        "hidden_size": _TEXT["hidden_size"],
        "vocab_size": VOCABULARY,
        "image_token_index": FIRST_PIECE + 1,
        "mm_tokens_per_image": 9,
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER, "image_size": side},
    }
    return TinyVision(
        config,
        (begin, soft, end),
        soft,
        begin,
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}},
        tokenizer_config={"extra_special_tokens": {"boi_token": begin, "image_token": soft, "eoi_token": end}},
        scale=0.5,  # what the layers add is normed, and must outweigh the embedding, with which the head is tied
        processor_config={"image_seq_length": 9},
    )


def _idefics(model_type: str, tower_type: str) -> TinyVision:
    """Four tokens a tile: a square picture becomes two by two tiles and itself, a very flat one two and itself."""
    tiles = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    specials = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles)
    side = 4 * PATCH
    config = {
        "model_type": model_type,
        **_ENDS,
        "vocab_size": VOCABULARY,
        "scale_factor": 2,
        "image_token_id": FIRST_PIECE,
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": tower_type, **_TOWER, "image_size": side},
    }
    preprocessor = {
        "image_processor_type": "SmolVLMImageProcessor" if model_type == "smolvlm" else "Idefics3ImageProcessor",
        "size": {"longest_edge": 2 * side},
        "max_image_size": {"longest_edge": side},
    }
    return TinyVision(config, specials, "<image>", "<image>", preprocessor, processor_config={"image_seq_len": 4})


def _llava() -> TinyVision:
    """Nine tokens a picture of whatever size: three by three patches, and CLIP's class token left out."""
    side = 3 * PATCH
    config = {
        "model_type": "llava",
        **_ENDS,
        "vocab_size": VOCABULARY,
        "image_token_index": FIRST_PIECE,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_TOWER, "image_size": side},
    }
    preprocessor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
    }
    processor = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return TinyVision(config, ("<image>",), "<image>", "<image>", preprocessor, processor_config=processor)


def _deep() -> TinyVision:
    """Qwen3-VL: as the older Qwens, with the text's part of the config apart."""
    like = _qwen(DEEP, hidden_size=32, out_hidden_size=64, intermediate_size=48)
    rope = {"type": "default", "mrope_section": [3, 3, 2]}
    vision = {**like.config["vision_config"], "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text = {"model_type": "qwen3_vl_text", **_TEXT, "head_dim": 16, "rope_scaling": rope}
    own = {name: value for name, value in like.config.items() if name not in {*_TEXT, "rope_scaling"}}
    return replace(like, config={**own, "vocab_size": VOCABULARY, "text_config": text, "vision_config": vision})


DEEP = "qwen3_vl"  # of a kind that mlx-vlm runs and the engine does not: features go into several of its layers
FAMILIES: Mapping[str, TinyVision] = {
    "qwen2_vl": _qwen("qwen2_vl", embed_dim=32, hidden_size=64, mlp_ratio=2),
    "qwen2_5_vl": _qwen(  # the first block sees windows of two by two tokens, the second everything
        "qwen2_5_vl",
        hidden_size=32,
        out_hidden_size=64,
        intermediate_size=48,
        window_size=2 * QWEN_UNIT,
        fullatt_block_indexes=[1],
    ),
    "gemma3": _gemma(),
    "smolvlm": _idefics("smolvlm", "smolvlm_vision"),
    "idefics3": _idefics("idefics3", "idefics3_vision"),
    "llava": _llava(),
}
_WRITTEN = {**FAMILIES, DEEP: _deep()}


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def build(family: str, seed: int = 0) -> Module:
    """The model as mlx-vlm makes it from the configuration, with weights drawn from their path and the seed alone."""
    tiny = _WRITTEN[family]
    config = json.loads(json.dumps(tiny.config))  # mlx-vlm writes into what it is given
    module, _ = get_model_and_args(config)
    model_config = module.ModelConfig.from_dict(config)
    model = module.Model(update_module_configs(model_config, module, config, ["text", "vision"]))
    silent = range(FIRST_PIECE, FIRST_PIECE + len(tiny.specials))
    flat = [
        (path, _drawn(path, value, scale=tiny.scale, seed=seed, silent=silent))
        for path, value in tree_flatten(model.parameters())
    ]
    model.load_weights(flat)
    mx.eval(model.parameters())
    return model.eval()


def _drawn(path: str, value: mx.array, *, scale: float, seed: int, silent: range) -> mx.array:
    """Matrices and kernels by their fan-in; vectors (norms, biases) keep the model's own start, as in tests/models.py.

    Rows `silent` of the head are zero: these tokens' logits lie far below the best of three hundred others.
    """
    if value.ndim < 2:
        return mx.zeros(value.shape) if path.endswith("bias") else value.astype(mx.float32)
    key = mx.random.key(seed * 1_000_003 + zlib.crc32(path.encode()))
    bound = scale / (value.size / value.shape[0]) ** 0.5
    if "embed_tokens" in path or "position_embedding" in path:
        return mx.random.normal(value.shape, mx.float32, scale=bound, key=key)
    drawn = mx.random.uniform(-bound, bound, value.shape, mx.float32, key=key)
    if path.endswith("lm_head.weight"):
        drawn[silent.start : silent.stop] = 0
    return drawn


# ---------------------------------------------------------------------------------------------------------------------
# Model folders


def write(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    context: int = CONTEXT,
    eos: int | Sequence[int] = IM_END,
) -> Path:
    """Writes a model folder that `mlx_vlm.load` takes, and returns it. `eos` goes to config.json."""
    tiny = _WRITTEN[family]
    directory.mkdir(parents=True, exist_ok=True)
    config = _with_context(tiny.config, context) | {"eos_token_id": eos if isinstance(eos, int) else list(eos)}
    weights = dict(tree_flatten(build(family, seed).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer = byte_tokenizer({FIRST_PIECE + place: text for place, text in enumerate(tiny.specials)})
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tiny.specials])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[IM_END],
        "pad_token": SPECIAL[END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": _CHAT_TEMPLATE % tiny.marker,
        **tiny.tokenizer_config,
    }
    files = {
        "config.json": config,
        "tokenizer_config.json": tokenizer_config,
        "preprocessor_config.json": tiny.preprocessor,
        "processor_config.json": tiny.processor_config,
    }
    for name, content in files.items():
        if content:
            (directory / name).write_text(json.dumps(content, indent=1))
    return directory


def _with_context(config: Mapping[str, Any], context: int) -> dict[str, Any]:
    copied = json.loads(json.dumps(config))
    copied.get("text_config", copied)["max_position_embeddings"] = context
    return dict(copied)


def picture(look: int | str, size: tuple[int, int] = (QWEN_UNIT, QWEN_UNIT)) -> Image.Image:
    """An RGB picture of `size` (width, height): one colour by its name, or coarse noise by its seed."""
    if isinstance(look, str):
        return Image.new("RGB", size, look)
    coarse = np.random.default_rng(look).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.NEAREST)


# ---------------------------------------------------------------------------------------------------------------------
# The oracle


@dataclass(frozen=True, slots=True)
class Seeing:
    """A loaded vision model and its processor, as mlx-vlm's `load` gives them."""

    model: Any
    processor: Any


def load(directory: Path) -> Seeing:
    return Seeing(*mlx_vlm.load(str(directory)))


Message = Mapping[str, Any]


def user(*parts: str | None) -> Message:
    """A user's turn: texts, and None where a picture stands."""
    content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    return {"role": "user", "content": content}


def inputs_of(processor: Any, messages: Sequence[Message], images: Sequence[Image.Image]) -> dict[str, mx.array]:
    """What mlx-vlm's processor makes of a conversation: `input_ids` (1, length) and the pictures' arrays.

    The processor is called with nothing else, since LLaVA's hands any other argument to its image processor, too.
    """
    text = processor.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return dict(processor(text=[text], images=list(images) or None))


def ids_of(processor: Any, messages: Sequence[Message], images: Sequence[Image.Image]) -> list[int]:
    """The conversation's token ids, pictures' tokens included."""
    return [int(token) for token in np.array(inputs_of(processor, messages, images)["input_ids"])[0]]


def cold_run(
    seeing: Seeing, messages: Sequence[Message], images: Sequence[Image.Image], n: int
) -> tuple[list[int], mx.array]:
    """`n` greedy tokens as mlx-vlm's own generator makes them for one request, and each step's log-probabilities.

    The second is (n, vocabulary), evaluated. This is what every cached, chunked or batched run must equal.
    """
    inputs = inputs_of(seeing.processor, messages, images)
    ids = inputs.pop("input_ids")
    pixels, mask = inputs.pop("pixel_values", None), inputs.pop("attention_mask", None)
    steps = generate_step(ids, seeing.model, pixels, mask, max_tokens=n, temperature=0.0, **inputs)
    tokens, logprobs = zip(*[(int(token), logprobs) for token, logprobs in steps], strict=True)
    stacked = mx.stack(list(logprobs))
    mx.eval(stacked)
    return list(tokens), stacked
