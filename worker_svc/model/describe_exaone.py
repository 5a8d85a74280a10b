"""Describes the attention of EXAONE 4: where some layers have a window, the others have no positions."""

from dataclasses import replace
from typing import Any

from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.description import ModelDescription


def describe_exaone(config: Any) -> ModelDescription | None:
    """The description with norms before attention and MLP; None: it cannot hold activation or positions."""
    description = describe_decoder(config, windows=Windows.BY_LAYER_TYPES, qk_norm=True)
    if description is None or config.sliding_window is None:
        return description
    layers = tuple(
        layer if kind == "sliding_attention" else replace(layer, attention=replace(layer.attention, rope=None))
        for layer, kind in zip(description.layers, config.layer_types, strict=True)
    )
    return replace(description, layers=layers)
