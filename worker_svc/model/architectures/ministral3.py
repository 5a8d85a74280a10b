"""Ministral 3: Mistral, whose queries grow with their positions beyond the original context."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.description import DecoderLayer, ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    description = describe_decoder(config, windows=Windows.ALL_LAYERS)
    # transformers has no other value for these where they are missing.
    beta, original = map(config.rope_parameters.get, ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if description is None or beta is None or not original:
        return None

    def layer(described: DecoderLayer) -> DecoderLayer:
        attention = described.attention
        assert attention.rope is not None
        rope = replace(attention.rope, query_beta=float(beta))
        return replace(described, attention=replace(attention, rope=rope))

    return replace(description, layers=tuple(map(layer, description.layers)))


ARCHITECTURE = Architecture.of_decoder(__file__, "Ministral3", _describe)
