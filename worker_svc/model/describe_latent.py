"""Describes the multi-head latent attention of DeepSeek-V2 and its successors."""

import math
from dataclasses import replace
from typing import Any

from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.description import (
    AttentionSpec,
    DecoderLayer,
    LatentSpec,
    LinearLayer,
    LinearRole,
    ModelDescription,
    Norm,
    RopeConfig,
    SplitDimension,
    StoredLinear,
)

# transformers and the models' own code set no epsilon for the norms of latent vectors.
_EPS = 1e-6


def describe_latent(config: Any, *, rotates_neighbours: bool) -> ModelDescription | None:
    """The description of a model whose tensors are named like DeepSeek's, with the dense MLP in all layers.

    None: a description cannot hold its activation or positions.
    """
    dense = describe_decoder(config, windows=Windows.NONE)
    if dense is None:
        return None

    def layer(number: int, described: DecoderLayer) -> DecoderLayer:
        rope = described.attention.rope
        assert rope is not None
        prefix = f"model.layers.{number}.self_attn."
        return replace(described, attention=_attention(config, prefix, rope, rotates_neighbours))

    return replace(dense, layers=tuple(layer(number, described) for number, described in enumerate(dense.layers)))


def _attention(config: Any, prefix: str, rope: RopeConfig, rotates_neighbours: bool) -> AttentionSpec:
    num_heads, hidden, bias = config.num_attention_heads, config.hidden_size, config.attention_bias
    rank, rotated, plain = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
    queries, values, stored = num_heads * (plain + rotated), config.v_head_dim, rank + rotated

    def product(role: LinearRole, inputs: int, *parts: StoredLinear) -> LinearLayer:
        # Ranks cannot share latent vectors.
        return LinearLayer(role, inputs, parts, SplitDimension.OUTPUTS)

    query = StoredLinear(f"{prefix}q_proj", (queries,))
    query_norm = query_up = None
    if config.q_lora_rank is not None:
        query = StoredLinear(f"{prefix}q_a_proj", (config.q_lora_rank,), bias)
        query_norm = Norm(f"{prefix}q_a_layernorm.weight", config.q_lora_rank, _EPS)
        query_up = product(LinearRole.LATENT_UP, config.q_lora_rank, StoredLinear(f"{prefix}q_b_proj", (queries,)))
    kv_up = StoredLinear(f"{prefix}kv_b_proj", (num_heads * (plain + values),))
    output = StoredLinear(f"{prefix}o_proj", (hidden,), bias)
    return AttentionSpec(
        num_heads,
        num_kv_heads=1,
        head_dim=stored,
        scale=_scale(config),
        qkv=product(LinearRole.QKV, hidden, query, StoredLinear(f"{prefix}kv_a_proj_with_mqa", (stored,), bias)),
        output=LinearLayer(LinearRole.ATTENTION_OUTPUT, num_heads * values, (output,), SplitDimension.INPUTS, values),
        rope=replace(rope, rotated_dims=rotated),
        latent=LatentSpec(
            rank,
            rotated,
            plain,
            values,
            kv_norm=Norm(f"{prefix}kv_a_layernorm.weight", rank, _EPS),
            kv_up=product(LinearRole.LATENT_UP, rank, kv_up),
            query_norm=query_norm,
            query_up=query_up,
            rotates_neighbours=rotates_neighbours,
        ),
    )


def _scale(config: Any) -> float:
    """The inverse root of a query's dimensions, times the square of YaRN's temperature where the config has one for all
    dimensions (`mscale_all_dim`).
    """
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    rope = config.rope_parameters
    weight = rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") == "default" or not weight or rope["factor"] <= 1:
        return scale
    temperature: float = 0.1 * weight * math.log(rope["factor"]) + 1.0
    return scale * temperature * temperature
