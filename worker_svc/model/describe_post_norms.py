"""Describes layers with norms after attention and MLP in place of those before, as OLMo 2's."""

from dataclasses import replace
from typing import Any

from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import norm_called
from worker_svc.model.description import DecoderLayer, ModelDescription


def describe_olmo(config: Any, windows: Windows) -> ModelDescription | None:
    """The description of OLMo 2 or 3: queries and keys have norms of all heads. None: it cannot hold activation or
    positions.
    """
    bias: bool = config.attention_bias
    description = describe_decoder(
        config, windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True, joint_qk_norm=True
    )
    return description and with_post_norms(description)


def with_post_norms(description: ModelDescription) -> ModelDescription:
    """The description of a decoder that is named as Llama, with such layers."""
    return replace(description, layers=tuple(map(_layer, description.layers)))


def _layer(described: DecoderLayer) -> DecoderLayer:
    return replace(
        described,
        attention_norm=None,
        post_attention_norm=described.mlp_norm,  # it has Llama's name of the norm before the MLP
        mlp_norm=None,
        post_mlp_norm=norm_called("post_feedforward_layernorm", described.mlp_norm),
    )
