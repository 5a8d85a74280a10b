"""SmolLM3: Llama, some of whose layers have no positions, and some a window."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import with_positions_where
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.attention_bias
    description = describe_decoder(
        config, windows=Windows.BY_LAYER_TYPES, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias
    )
    if description is None or len(config.no_rope_layers) < len(description.layers):
        return None
    return with_positions_where(description, config.no_rope_layers[: len(description.layers)])


ARCHITECTURE = Architecture.of_decoder(__file__, "SmolLM3", _describe)
