"""A llama-family GGUF file's header translated: which mlx-lm config it means, and what its tensors are called there.

Pure; used by the converter's process. llama.cpp stores the query and key rows in the order of interleaved rotary pairs,
which mlx-lm computes with `rope_traditional`, so the weights stay as they are. GGUF calls mistral and smollm "llama"
too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from omlxd.engine.api import Unsupported
from omlxd.engine.gguf_header import BadGguf, Header, Value

Config = dict[str, object]

GROUP_SIZE = 32
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_TYPE = "llama"


class _Metadata:
    """The metadata with the types that the format promises."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values

    def count(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if type(value) is not int or value < 1:
            raise BadGguf(f"{key} is {value!r}, not a positive number")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key, default)
        if not isinstance(value, (int, float)) or not value > 0:
            raise BadGguf(f"{key} is {value!r}, not a positive number")
        # Stored in 32 bits: 1e-5 comes out with seven digits that mean something.
        return float(f"{value:.7g}")

    def get(self, key: str) -> Value | None:
        return self._values.get(key)


def mlx_config(header: Header) -> Config:
    """config.json's content. Raises Unsupported naming what mlx-lm's llama has not, or BadGguf."""
    data = _Metadata(header.metadata)
    architecture = data.get("general.architecture")
    if architecture != _MODEL_TYPE:
        raise Unsupported(f"GGUF architecture {architecture!r}", "models of the llama family are imported")
    _refuse_variants(data, header)
    heads = data.count("llama.attention.head_count")
    hidden = data.count("llama.embedding_length")
    head_dim = data.count("llama.attention.key_length", hidden // heads)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if data.count(key, head_dim) != head_dim:
            raise Unsupported(f"GGUF {key}", f"only heads of one size, rotated whole, are imported: {head_dim} here")
    config: Config = {
        "model_type": _MODEL_TYPE,
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": data.count("llama.block_count"),
        "intermediate_size": data.count("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": data.count("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": data.real("llama.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": data.count("llama.context_length"),
        "rope_theta": data.real("llama.rope.freq_base", 10000.0),
        "rope_traditional": True,
        "vocab_size": _shape(header, "token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    _check_shapes(header, config)
    return config | _quantisation(header)


def mlx_name(tensor: str) -> str:
    """mlx-lm's name for a tensor, or for one of the arrays that MLX makes of it (`.weight`, `.scales`, `.biases`)."""
    outer, _, part = tensor.rpartition(".")
    if outer in _OUTER:
        return f"{_OUTER[outer]}.{part}"
    match outer.split("."):
        case ["blk", layer, inner] if inner in _INNER and layer.isdecimal():
            return f"model.layers.{int(layer)}.{_INNER[inner]}.{part}"
    raise Unsupported(f"GGUF tensor {tensor}", "mlx-lm's llama has no such weight")


def _refuse_variants(data: _Metadata, header: Header) -> None:
    if data.get("llama.expert_count"):
        raise Unsupported("GGUF llama.expert_count", "mixtures of experts are not imported")
    scaling = data.get("llama.rope.scaling.type")
    if scaling not in (None, "none") or "rope_freqs.weight" in header.tensors:
        what = f"GGUF rope scaling {scaling or 'rope_freqs'!r}"
        raise Unsupported(what, "only unscaled rotary positions are imported")


def _shape(header: Header, tensor: str) -> tuple[int, ...]:
    if tensor not in header.tensors:
        raise BadGguf(f"{tensor} is missing")
    return header.tensors[tensor].shape


def _check_shapes(header: Header, config: Config) -> None:
    """Every weight that the config asks for is there in its shape, and no other."""
    layers = config["num_hidden_layers"]
    if not isinstance(layers, int) or layers * len(_INNER) > len(header.tensors):
        raise BadGguf(f"it claims {layers} layers and has {len(header.tensors)} tensors, too few")
    expected = _expected_shapes(config)
    for tensor in header.tensors:
        if not tensor.endswith(".weight"):
            raise Unsupported(f"GGUF tensor {tensor}", "mlx-lm's llama is imported without biases")
        if mlx_name(tensor) not in expected:
            raise BadGguf(f"{tensor} belongs to none of its {layers} layers")
    found = {mlx_name(tensor): tensor for tensor in header.tensors}
    for name, shape in expected.items():
        if name not in found:
            raise BadGguf(f"the tensor for {name} is missing")
        if _shape(header, found[name]) != shape:
            raise BadGguf(f"{found[name]} is of shape {_shape(header, found[name])}, not {shape}")
        if len(shape) == 1 and header.tensors[found[name]].type.bits is not None:
            raise Unsupported(f"GGUF tensor {found[name]}", "mlx-lm has no quantised norms")


def _expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    def size(key: str) -> int:
        value = config[key]
        assert isinstance(value, int)
        return value

    hidden, inner, words = size("hidden_size"), size("intermediate_size"), size("vocab_size")
    queries = size("num_attention_heads") * size("head_dim")
    keys = size("num_key_value_heads") * size("head_dim")
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {
        f"model.layers.{n}.{name}.weight": shape
        for n in range(size("num_hidden_layers"))
        for name, shape in layer.items()
    }
    shapes |= {"model.embed_tokens.weight": (words, hidden), "model.norm.weight": (hidden,)}
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": (words, hidden)}


def _quantisation(header: Header) -> Config:
    """The commonest width as the rule, each other width by the name of its layer."""
    widths = {
        mlx_name(tensor.name).removesuffix(".weight"): tensor.type.bits
        for tensor in header.tensors.values()
        if tensor.type.bits is not None
    }
    if not widths:
        return {}
    bits = Counter(widths.values()).most_common(1)[0][0]
    own = {name: {"group_size": GROUP_SIZE, "bits": width} for name, width in widths.items() if width != bits}
    return {"quantization": {"group_size": GROUP_SIZE, "bits": bits, **own}}
