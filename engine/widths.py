"""A model's widths, read once from its config: what a prefill turn's transient is computed from.

Pure. Names differ between architectures and a text model may be nested in a multimodal one, so each width is looked
for under every name it has; one that is nowhere is taken from those beside it, on the large side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omlxd.engine.estimator import Widths

Config = Mapping[str, object]

_FUSED_HEAD_DIMS = (64, 80, 128)  # MLX's Metal kernels for prompts; every other width writes its scores out


def widths(config: Config, *, vocabulary: int, item_bytes: int, gpu: bool) -> Widths:
    """The widths of the model that `config` describes, run on a GPU or not."""
    hidden = _first(config, ("hidden_size", "d_model", "n_embd", "dim", "model_dim")) or 4096
    heads = _first(config, ("num_attention_heads", "n_heads", "n_head", "num_heads")) or max(1, hidden // 128)
    head_dim = _head_dim(config) or max(1, hidden // heads)
    intermediate = _first(config, ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner")) or 4 * hidden
    experts = _first(config, ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "experts_per_token"))
    dense = _first(config, ("intermediate_size",)) or 0
    return Widths(
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        # A mixture often has dense layers too: whichever is wider counts.
        intermediate=intermediate if intermediate * (experts or 1) >= dense else dense,
        vocabulary=vocabulary,
        experts=(experts or 1) if intermediate * (experts or 1) >= dense else 1,
        item_bytes=item_bytes,
        fused=gpu and head_dim in _FUSED_HEAD_DIMS,
    )


def _head_dim(config: Config) -> int | None:
    latent = _first(config, ("qk_nope_head_dim",))
    if latent is not None:  # MLA: keys have a part with positions and one without
        return latent + (_first(config, ("qk_rope_head_dim",)) or 0)
    return _first(config, ("head_dim", "attention_head_dim"))


def _first(config: Config, names: Sequence[str]) -> int | None:
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        for name in names:
            value = part.get(name)
            if type(value) is int and value > 0:
                return value
    return None
