"""Describes Hunyuan: queries and keys are normalised head by head after rotation, whose base may be stretched."""

from copy import copy
from dataclasses import replace
from typing import Any

from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import norm_called
from worker_svc.model.description import DecoderLayer, ModelDescription


def describe_hunyuan(config: Any) -> ModelDescription | None:
    """The description without experts; None: it cannot hold activation or positions."""
    bias: bool = config.attention_bias
    description = describe_decoder(
        _with_stretched_base(config), windows=Windows.NONE, qkv_bias=bias, output_bias=bias, qk_norm=True
    )
    return description and replace(description, layers=tuple(map(_layer, description.layers)))


def _with_stretched_base(config: Any) -> Any:
    """The config with the base that transformers computes: with `alpha`, positions of the kind `dynamic` are fixed."""
    rope = config.rope_parameters
    if rope["rope_type"] != "dynamic" or not rope.get("alpha"):
        return config
    stretched, dim = copy(config), config.head_dim
    base = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
    stretched.rope_parameters = {"rope_type": "default", "rope_theta": base}
    return stretched


def _layer(layer: DecoderLayer) -> DecoderLayer:
    attention = replace(
        layer.attention,
        query_norm=norm_called("query_layernorm", layer.attention.query_norm),
        key_norm=norm_called("key_layernorm", layer.attention.key_norm),
        norms_after_rotation=True,
    )
    return replace(layer, attention=attention)
