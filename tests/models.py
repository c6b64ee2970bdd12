"""Tiny random-weight models of every cache layout, a byte tokenizer, and the oracle that cached runs are compared with.

For tests of every room that needs a model; the calling thread owns what it gets. Nothing is downloaded, everything is
seeded and fp32: building one takes milliseconds. Scales follow CASES.md ("Fixtures"): large enough that dropping one
prompt token moves the logits a hundred times further than batching or chunking does.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 320
CONTEXT = 512
WINDOW = 16
END_OF_TEXT, IM_START, IM_END = 256, 257, 258
FIRST_PIECE = 259
SLOW_DECAY = -3.0  # softplus of it is a recurrent layer's time step: at the usual 1.0 all is forgotten in 20 tokens
SPECIAL = {END_OF_TEXT: "<|endoftext|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model's configuration as its config.json says it, and how large its random weights are."""

    config: Mapping[str, Any]
    scale: float = 1.0
    recurrent: bool = False  # some layer's state cannot be cut at a token
    batches: bool = True  # every layer's cache class can be merged into a batch

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])


_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
}
_MLA = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 2,
    "first_k_dense_replace": 2,  # of two layers: dense
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_QWEN3_NEXT = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "num_experts_per_tok": 1,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}
_KIMI = {
    "head_dim": 16,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": CONTEXT,
    "num_experts": 0,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_MAMBA2 = {
    "num_heads": 4,
    "head_dim": 32,
    "intermediate_size": 128,
    "state_size": 16,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, 100.0],
    "time_step_rank": "auto",
}
_FALCON_H1 = {
    "head_dim": 16,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_chunk_size": 16,
    "lm_head_multiplier": 1.0,
}
_LLAMA4 = {
    "attention_bias": False,
    "attention_chunk_size": WINDOW,
    "head_dim": 16,
    "interleave_moe_layer_step": 8,  # beyond the last layer: dense
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,  # three of four are chunked
    "num_experts_per_tok": 1,
    "num_local_experts": 1,
    "rope_scaling": None,
    "use_qk_norm": True,
}


def _config(model_type: str, **own: Any) -> dict[str, Any]:
    special = {"bos_token_id": END_OF_TEXT, "pad_token_id": END_OF_TEXT, "eos_token_id": IM_END}
    return {**_COMMON, "model_type": model_type, **special, **own}


MODELS: Mapping[str, TinyModel] = {
    "llama": TinyModel(_config("llama", tie_word_embeddings=False)),
    "qwen3": TinyModel(_config("qwen3", head_dim=16, tie_word_embeddings=False)),
    "gemma3_text": TinyModel(
        _config("gemma3_text", head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW, sliding_window_pattern=2)
    ),
    "gpt_oss": TinyModel(
        _config(
            "gpt_oss",
            head_dim=16,
            num_local_experts=2,
            num_experts_per_tok=2,
            intermediate_size=64,
            rope_scaling={"rope_type": "default"},
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        ),
        scale=2.0,
    ),
    "cohere2": TinyModel(
        _config("cohere2", head_dim=16, sliding_window=WINDOW, sliding_window_pattern=2, logit_scale=1.0),
        scale=2.0,
    ),
    "deepseek_v3": TinyModel(_config("deepseek_v3", **_MLA), scale=2.0),
    "deepseek_v32": TinyModel(
        # 24 of the keys are attended to, so that what the indexer's own cache holds decides which.
        _config("deepseek_v32", **_MLA, index_head_dim=16, index_n_heads=4, index_topk=24)
    ),
    "llama4": TinyModel({**_config("llama4"), "text_config": _config("llama4_text", **_LLAMA4)}, batches=False),
    "llama4_text": TinyModel(
        _config(
            "llama4_text",
            head_dim=16,
            intermediate_size_mlp=96,
            tie_word_embeddings=False,
            no_rope_layers=[1, 0],
            use_qk_norm=True,
        )
    ),
    "qwen3_next": TinyModel(_config("qwen3_next", **_QWEN3_NEXT), recurrent=True),
    "lfm2": TinyModel(
        _config(
            "lfm2",
            norm_eps=1e-5,
            conv_bias=False,
            conv_L_cache=3,
            block_dim=64,
            block_ff_dim=96,
            block_multiple_of=32,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            full_attn_idxs=[1],
        ),
        scale=2.0,
        recurrent=True,
    ),
    "kimi_linear": TinyModel(_config("kimi_linear", **_KIMI), recurrent=True),
    "mamba2": TinyModel(_config("mamba2", **_MAMBA2), scale=2.0, recurrent=True),
    "falcon_h1": TinyModel(_config("falcon_h1", **_FALCON_H1), scale=2.0, recurrent=True),
}


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def _instance(config: Mapping[str, Any], seed: int = 0) -> nn.Module:
    mx.random.seed(seed)  # the vectors that some models draw themselves (biases, decays)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    return module.Model(module.ModelArgs.from_dict(dict(config)))


def _drawn(path: str, value: mx.array, *, scale: float, seed: int) -> mx.array:
    """Matrices are drawn from their path and the seed alone; vectors (norms, biases) keep the model's own start."""
    if path.endswith("dt_bias"):
        return mx.full(value.shape, SLOW_DECAY)
    if value.ndim < 2:
        return value.astype(mx.float32)
    key = mx.random.key(seed * 1_000_003 + zlib.crc32(path.encode()))
    bound = scale / value.shape[-1] ** 0.5
    if "embed" in path:
        return mx.random.normal(value.shape, mx.float32, scale=bound, key=key)
    return mx.random.uniform(-bound, bound, value.shape, mx.float32, key=key)


def build(name: str, seed: int = 0, *, context: int = CONTEXT, **config: Any) -> nn.Module:
    """The model, evaluated; `config` replaces or adds keys of its configuration."""
    tiny = MODELS[name]
    model = _instance({**tiny.config, "max_position_embeddings": context, **config}, seed)
    flat = [
        (path, _drawn(path, value, scale=tiny.scale, seed=seed)) for path, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(flat))
    mx.eval(model.parameters())
    return model.eval()


def scripted(follow: Mapping[int, int], *, otherwise: int = IM_END, sharpness: float = 1.0) -> nn.Module:
    """A llama in which token t is always followed by `follow.get(t, otherwise)`, whatever came before.

    Its cache fills as any llama's does and decides nothing. `sharpness` 1 puts the chosen logit 17.9 above all others,
    0 makes all of them equal.
    """
    model = _instance(_scripted_config())
    following = mx.array([follow.get(token, otherwise) for token in range(VOCABULARY)])
    one_hot = mx.eye(VOCABULARY)
    model.model.embed_tokens.weight = one_hot
    model.lm_head.weight = one_hot[:, following] * sharpness
    for layer in model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
        layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    mx.eval(model.parameters())
    return model.eval()


def _scripted_config(context: int = CONTEXT) -> dict[str, Any]:
    own = {"hidden_size": VOCABULARY, "head_dim": 16, "tie_word_embeddings": False}
    return _config("llama", **own) | {"num_hidden_layers": 1, "max_position_embeddings": context}


# ---------------------------------------------------------------------------------------------------------------------
# Model folders


def byte_tokenizer(pieces: Mapping[int, str | bytes] | None = None) -> Tokenizer:
    """Byte-level BPE without merges: each UTF-8 byte is a token, in the order of their values, then the special ones.

    `pieces` gives ids above them a text of their own (whole or part of a character); nothing is ever encoded to these.
    """
    letters = byte_letters()
    vocabulary = {letters[byte]: byte for byte in range(256)} | {text: token for token, text in SPECIAL.items()}
    texts: dict[int, str | bytes] = {token: f" w{token}" for token in range(FIRST_PIECE, VOCABULARY)}
    for token, text in (texts | dict(pieces or {})).items():
        data = text.encode() if isinstance(text, str) else text
        spelled = "".join(letters[byte] for byte in data)
        if spelled in vocabulary:
            raise ValueError(f"piece {text!r} already is token {vocabulary[spelled]}")
        vocabulary[spelled] = token
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL.values()])
    return tokenizer


def byte_letters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte value (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def write(
    name: str,
    directory: Path,
    *,
    seed: int = 0,
    context: int = CONTEXT,
    chat_template: str | None = CHAT_TEMPLATE,
    eos: int | Sequence[int] = IM_END,
    pieces: Mapping[int, str | bytes] | None = None,
    **changes: Any,
) -> Path:
    """Writes a model folder that `mlx_lm.utils.load` takes, and returns it.

    `eos` goes to config.json, and so do the `changes`, which the model is built with.
    """
    eos_ids = eos if isinstance(eos, int) else list(eos)
    config = {**MODELS[name].config, "max_position_embeddings": context, "eos_token_id": eos_ids, **changes}
    model = build(name, seed, context=context, **changes)
    return _write_folder(directory, model, config, chat_template=chat_template, tokenizer=byte_tokenizer(pieces))


def write_scripted(
    directory: Path,
    pieces: Sequence[str | bytes],
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    context: int = CONTEXT,
    sharpness: float = 1.0,
) -> Path:
    """A model folder that answers any prompt with exactly these pieces, one token each, and then ends.

    A piece of one byte is that byte's token. No piece may occur twice: a token is always followed by the same one.
    The prompt must not end with a piece (it ends with a newline under the chat template).
    """
    ids = [_piece_id(n, piece) for n, piece in enumerate(pieces)]
    if len(set(ids)) < len(ids):
        raise ValueError("a piece that repeats cannot be scripted: split the text elsewhere")
    own = {token: piece for token, piece in zip(ids, pieces, strict=True) if token >= FIRST_PIECE}
    model = scripted(dict(zip(ids, [*ids[1:], IM_END], strict=True)), otherwise=ids[0], sharpness=sharpness)
    config = _scripted_config(context)
    return _write_folder(directory, model, config, chat_template=chat_template, tokenizer=byte_tokenizer(own))


def _piece_id(position: int, piece: str | bytes) -> int:
    data = piece.encode() if isinstance(piece, str) else piece
    return data[0] if len(data) == 1 else FIRST_PIECE + position


def _write_folder(
    directory: Path,
    model: nn.Module,
    config: Mapping[str, Any],
    *,
    chat_template: str | None,
    tokenizer: Tokenizer,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[IM_END],
        "pad_token": SPECIAL[END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    return directory


# ---------------------------------------------------------------------------------------------------------------------
# The oracle


def cold_run(model: nn.Module, prompt_ids: Sequence[int], n: int) -> tuple[list[int], mx.array]:
    """`n` greedy tokens after the prompt, prefilled in one piece on fresh caches, and each step's log-probabilities.

    The second is (n, vocabulary), evaluated. This is what every cached, chunked or batched run must equal.
    """
    caches = make_prompt_cache(model)
    tokens = mx.array(list(prompt_ids))
    ids: list[int] = []
    steps: list[mx.array] = []
    for _ in range(n):
        logits = model(tokens[None], cache=caches)[0, -1]
        steps.append(logits - mx.logsumexp(logits, keepdims=True))
        tokens = mx.argmax(logits, keepdims=True)
        ids.append(int(tokens.item()))
    logprobs = mx.stack(steps)
    mx.eval(logprobs)
    return ids, logprobs
