"""EXAONE 4: norms come after attention and MLP; where some layers have a window, the others have no positions."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_post_norms import with_post_norms
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    description = describe_decoder(config, windows=Windows.BY_LAYER_TYPES, qk_norm=True)
    if description is None:
        return None
    layers = tuple(
        layer
        if config.sliding_window is None or kind == "sliding_attention"
        else replace(layer, attention=replace(layer.attention, rope=None))
        for layer, kind in zip(description.layers, config.layer_types, strict=True)
    )
    return with_post_norms(replace(description, layers=layers))


ARCHITECTURE = Architecture.of_decoder(__file__, "Exaone4", _describe)
