"""Describes a model whose config and tensors are named like Llama's: the common part of that family."""

import math
from typing import Any

from worker_svc.model.description import (
    Activation,
    AttentionSpec,
    DecoderLayer,
    LinearLayer,
    LinearRole,
    MlpSpec,
    ModelDescription,
    Norm,
    RopeConfig,
    RopeKind,
    SplitDimension,
    StoredLinear,
)

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


def describe_decoder(
    config: Any,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelDescription | None:
    """The description of a model whose tensors are named like Llama's. None: a description cannot hold its activation
    or positions.
    """
    activation = _ACTIVATIONS.get(config.hidden_act)
    rope = rope_config(config.rope_parameters, config.max_position_embeddings)
    if activation is None or rope is None:
        return None
    hidden: int = config.hidden_size
    num_heads: int = config.num_attention_heads
    num_kv_heads: int = config.num_key_value_heads or num_heads
    head_dim: int = getattr(config, "head_dim", None) or hidden // num_heads
    width: int = config.intermediate_size

    def norm(tensor: str, size: int) -> Norm:
        return Norm(tensor, size, config.rms_norm_eps)

    def attention(prefix: str, window: int | None) -> AttentionSpec:
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        qkv = tuple(
            StoredLinear(f"{prefix}{name}_proj", (outputs,), qkv_bias)
            for name, outputs in (("q", queries), ("k", keys), ("v", keys))
        )
        output = StoredLinear(f"{prefix}o_proj", (hidden,), output_bias)
        return AttentionSpec(
            num_heads,
            num_kv_heads,
            head_dim,
            scale=float(head_dim**-0.5),
            qkv=LinearLayer(LinearRole.QKV, hidden, qkv, SplitDimension.OUTPUTS, head_dim),
            output=LinearLayer(LinearRole.ATTENTION_OUTPUT, queries, (output,), SplitDimension.INPUTS, head_dim),
            rope=rope,
            window=window,
            query_norm=norm(f"{prefix}q_norm.weight", head_dim) if qk_norm else None,
            key_norm=norm(f"{prefix}k_norm.weight", head_dim) if qk_norm else None,
        )

    def mlp(prefix: str) -> MlpSpec:
        gate_up = tuple(StoredLinear(f"{prefix}{name}_proj", (width,), mlp_bias) for name in ("gate", "up"))
        down = StoredLinear(f"{prefix}down_proj", (hidden,), mlp_bias)
        return MlpSpec(
            width,
            LinearLayer(LinearRole.GATE_UP, hidden, gate_up, SplitDimension.OUTPUTS),
            LinearLayer(LinearRole.DOWN, width, (down,), SplitDimension.INPUTS),
            activation=activation,
        )

    def layer(number: int, window: int | None) -> DecoderLayer:
        prefix = f"model.layers.{number}."
        return DecoderLayer(
            norm(f"{prefix}input_layernorm.weight", hidden),
            attention(f"{prefix}self_attn.", window),
            norm(f"{prefix}post_attention_layernorm.weight", hidden),
            mlp(f"{prefix}mlp."),
        )

    return ModelDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        context_length=config.max_position_embeddings,
        embedding="model.embed_tokens.weight",
        layers=tuple(layer(number, window) for number, window in enumerate(windows(config))),
        norm=norm("model.norm.weight", hidden),
        head=LinearLayer(
            LinearRole.HEAD, hidden, (StoredLinear("lm_head", (config.vocab_size,)),), SplitDimension.OUTPUTS
        ),
        tied_embeddings=config.tie_word_embeddings,
    )


def windows(config: Any) -> tuple[int | None, ...]:
    num_layers: int = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    if window is None or window >= config.max_position_embeddings:
        return (None,) * num_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def rope_config(rope: dict[str, Any], context_length: int) -> RopeConfig | None:
    kinds = {kind.value: kind for kind in RopeKind}
    kind = kinds.get(rope.get("rope_type", "default"))
    if kind is None or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    original = rope.get("original_max_position_embeddings") or context_length
    factor = rope.get("factor") or context_length / original
    return RopeConfig(
        kind=kind,
        theta=rope["rope_theta"],
        factor=factor,
        original_context_length=original,
        low_freq_factor=rope.get("low_freq_factor", 1.0),
        high_freq_factor=rope.get("high_freq_factor", 1.0),
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        truncate=rope.get("truncate", True),
        attention_factor=_attention_factor(rope, factor) if kind is RopeKind.YARN else 1.0,
    )


def _attention_factor(rope: dict[str, Any], factor: float) -> float:
    """YaRN's temperature (arXiv:2309.00071, equation 22), by the config's own weights where it has them."""
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)
