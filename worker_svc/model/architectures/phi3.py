"""Phi-3, 3.5 and 4: Llama with fused products, and with rotary positions of a part of each head in some models."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import fused
from worker_svc.model.description import DecoderLayer, ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    description = describe_decoder(config, windows=Windows.ALL_LAYERS, partial_rotation=True)
    return description and replace(description, layers=tuple(map(_layer, description.layers)))


def _layer(layer: DecoderLayer) -> DecoderLayer:
    (mlp,) = layer.mlps
    return replace(
        layer,
        attention=replace(layer.attention, qkv=fused(layer.attention.qkv, "qkv_proj")),
        mlp=replace(mlp, gate_up=fused(mlp.gate_up, "gate_up_proj")),
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "Phi3", _describe)
