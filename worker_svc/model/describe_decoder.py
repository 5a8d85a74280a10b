"""Describes a model whose config and tensors are named like Llama's: the common part of that family."""

from enum import Enum
from typing import Any

from worker_svc.model.describe_parts import ACTIVATIONS, NormForm, describe_attention, describe_head, describe_mlp
from worker_svc.model.describe_rope import context_length, ropes_of
from worker_svc.model.description import (
    AttentionSpec,
    DecoderLayer,
    MlpKind,
    MlpSpec,
    ModelDescription,
    RopeConfig,
    StoredLinear,
)


class Windows(Enum):
    """The layers of which transformers' code applies the `sliding_window` of a config. A config may have the field, and
    `layer_types`, whether the code reads them or not.
    """

    NONE = "none"
    ALL_LAYERS = "all layers"
    BY_LAYER_TYPES = "by layer types"
    """Layers that `layer_types` calls "sliding_attention"."""


def describe_decoder(
    config: Any,
    *,
    windows: Windows,
    activation_field: str = "hidden_act",
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    joint_qk_norm: bool = False,
    partial_rotation: bool = False,
    rotates_neighbours: bool = False,
    norms: NormForm | None = None,
    plain_mlp: tuple[str, str] | None = None,
) -> ModelDescription | None:
    """The description of a model whose tensors are named like Llama's. None: a description cannot hold its activation
    or positions.

    `windows` and `activation_field`, the field of the activation, are what transformers' code reads of the config.
    `qk_norm` is whether queries and keys have norms, `joint_qk_norm` whether these are of all heads together.
    `partial_rotation` is whether that code rotates a part of each head, if the config says so, and `rotates_neighbours`
    whether in pairs (2i, 2i + 1). `norms` default to RMS norms with the epsilon `rms_norm_eps`. `plain_mlp` are the
    names of the products of an MLP without a gate.
    """
    activation = ACTIVATIONS.get(getattr(config, activation_field))
    norm = (norms or NormForm(config.rms_norm_eps)).norm
    hidden: int = config.hidden_size
    num_heads: int = config.num_attention_heads
    num_kv_heads: int = config.num_key_value_heads or num_heads
    head_dim: int = getattr(config, "head_dim", None) or hidden // num_heads
    width: int = config.intermediate_size
    ropes = ropes_of(config, head_dim, partial=partial_rotation)
    if activation is None or ropes is None:
        return None

    def attention(prefix: str, window: int | None, rope: RopeConfig) -> AttentionSpec:
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        return describe_attention(
            num_heads,
            num_kv_heads,
            head_dim,
            tuple(
                StoredLinear(f"{prefix}{name}_proj", (outputs,), qkv_bias)
                for name, outputs in (("q", queries), ("k", keys), ("v", keys))
            ),
            StoredLinear(f"{prefix}o_proj", (hidden,), output_bias),
            rope=rope,
            window=window,
            query_norm=norm(f"{prefix}q_norm", queries if joint_qk_norm else head_dim) if qk_norm else None,
            key_norm=norm(f"{prefix}k_norm", keys if joint_qk_norm else head_dim) if qk_norm else None,
            rotates_neighbours=rotates_neighbours,
        )

    def mlp(prefix: str) -> MlpSpec:
        if plain_mlp is not None:
            up, down = (f"{prefix}{name}" for name in plain_mlp)
            one = (StoredLinear(up, (width,), mlp_bias),)
            return describe_mlp(MlpKind.PLAIN, one, StoredLinear(down, (hidden,), mlp_bias), activation)
        gate_up = tuple(StoredLinear(f"{prefix}{name}_proj", (width,), mlp_bias) for name in ("gate", "up"))
        return describe_mlp(MlpKind.GATED, gate_up, StoredLinear(f"{prefix}down_proj", (hidden,), mlp_bias), activation)

    def layer(number: int, window: int | None, rope: RopeConfig) -> DecoderLayer:
        prefix = f"model.layers.{number}."
        return DecoderLayer(
            norm(f"{prefix}input_layernorm", hidden),
            attention(f"{prefix}self_attn.", window, rope),
            norm(f"{prefix}post_attention_layernorm", hidden),
            mlp(f"{prefix}mlp."),
        )

    return ModelDescription(
        architecture=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        context_length=context_length(config, ropes),
        embedding="model.embed_tokens.weight",
        layers=tuple(map(layer, range(config.num_hidden_layers), _windows(config, windows), ropes)),
        norm=norm("model.norm", hidden),
        head=describe_head(hidden, config.vocab_size),
        tied_embeddings=config.tie_word_embeddings,
    )


def _windows(config: Any, windows: Windows) -> tuple[int | None, ...]:
    """How many keys the queries of each layer see; None: all."""
    num_layers: int = config.num_hidden_layers
    window: int | None = None if windows is Windows.NONE else config.sliding_window
    if window is None or window >= config.max_position_embeddings:
        return (None,) * num_layers
    if windows is Windows.ALL_LAYERS:
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
