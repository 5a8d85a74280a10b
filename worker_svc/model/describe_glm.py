"""Describes GLM-4: neighbouring dimensions of a part of each head are rotated, and gate and up are one tensor."""

from dataclasses import replace
from typing import Any

from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import fused
from worker_svc.model.description import DecoderLayer, ModelDescription


def describe_glm(config: Any) -> ModelDescription | None:
    """The description; None: it cannot hold activation or positions."""
    description = describe_decoder(
        config,
        windows=Windows.NONE,
        qkv_bias=config.attention_bias,
        partial_rotation=True,
        rotates_neighbours=True,
    )
    return description and replace(description, layers=tuple(map(_layer, description.layers)))


def _layer(layer: DecoderLayer) -> DecoderLayer:
    (mlp,) = layer.mlps
    return replace(layer, mlp=replace(mlp, gate_up=fused(mlp.gate_up, "gate_up_proj")))
