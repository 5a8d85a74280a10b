"""Ministral 3: Mistral, whose queries are scaled by their positions beyond the original context."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    description = describe_decoder(config, windows=Windows.ALL_LAYERS)
    if description is None:
        return None
    # The factor is 1 up to `original_max_position_embeddings`, where the context ends.
    original: int = config.rope_parameters.get("original_max_position_embeddings") or description.context_length
    is_scaled = config.rope_parameters.get("llama_4_scaling_beta") != 0
    length = min(description.context_length, original) if is_scaled else description.context_length
    return replace(description, context_length=length)


ARCHITECTURE = Architecture.of_decoder(__file__, "Ministral3", _describe)
