"""Command-R7B and Command A: layers with a window have rotary positions, and those without have none."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_cohere import describe_cohere
from worker_svc.model.describe_decoder import Windows
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    if config.sliding_window is None:
        return None
    description = describe_cohere(config, Windows.BY_LAYER_TYPES)
    if description is None:
        return None
    layers = tuple(
        layer if kind == "sliding_attention" else replace(layer, attention=replace(layer.attention, rope=None))
        for layer, kind in zip(description.layers, config.layer_types, strict=True)
    )
    return replace(description, layers=layers)


ARCHITECTURE = Architecture(__file__, "Cohere2ForCausalLM", _describe, ("Cohere2Model",))
