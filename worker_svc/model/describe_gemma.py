"""Describes Gemma 2 and 3: Llama's tensors with norms on both sides of attention and MLP, and a scaled embedding."""

from dataclasses import replace
from typing import Any

from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import NormForm, norm_called
from worker_svc.model.description import DecoderLayer, ModelDescription


def describe_gemma(config: Any, *, soft_cap: float | None = None, qk_norm: bool = False) -> ModelDescription | None:
    """The description; None: it cannot hold activation or positions.

    `soft_cap` is that of attention scores.
    """
    bias: bool = config.attention_bias
    description = describe_decoder(
        config,
        windows=Windows.BY_LAYER_TYPES,
        activation_field="hidden_activation",  # a config may also have `hidden_act`, which is not read
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=qk_norm,
        norms=NormForm(config.rms_norm_eps, weight_offset=1.0),
    )
    if description is None:
        return None

    def layer(described: DecoderLayer) -> DecoderLayer:
        return replace(
            described,
            attention=replace(described.attention, scale=float(config.query_pre_attn_scalar**-0.5), soft_cap=soft_cap),
            post_attention_norm=described.mlp_norm,  # it has Llama's name of the norm before the MLP
            mlp_norm=norm_called("pre_feedforward_layernorm", described.mlp_norm),
            post_mlp_norm=norm_called("post_feedforward_layernorm", described.mlp_norm),
        )

    return replace(
        description,
        layers=tuple(map(layer, description.layers)),
        embedding_scale=float(config.hidden_size**0.5),
        rounds_embedding_scale=True,
        logits_soft_cap=config.final_logit_softcapping,
    )
