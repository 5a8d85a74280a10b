"""SmolLM3: Llama, some of whose layers have no positions, and some a window."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.attention_bias
    description = describe_decoder(
        config, windows=Windows.BY_LAYER_TYPES, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias
    )
    if description is None or len(config.no_rope_layers) < len(description.layers):
        return None
    layers = tuple(
        layer if has_positions else replace(layer, attention=replace(layer.attention, rope=None))
        for layer, has_positions in zip(description.layers, config.no_rope_layers, strict=False)
    )
    return replace(description, layers=layers)


ARCHITECTURE = Architecture.of_decoder(__file__, "SmolLM3", _describe)
