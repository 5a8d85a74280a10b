"""Describes Command models: attention and MLP side by side behind one norm, and logits with a factor."""

from dataclasses import replace
from typing import Any

from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import NormForm, in_parallel
from worker_svc.model.description import ModelDescription, NormKind


def describe_cohere(config: Any, windows: Windows) -> ModelDescription | None:
    """The description; None: it cannot hold activation, positions or the factor."""
    bias, scale = config.attention_bias, config.logit_scale
    description = describe_decoder(
        config,
        windows=windows,
        qkv_bias=bias,
        output_bias=bias,
        rotates_neighbours=True,
        norms=NormForm(config.layer_norm_eps, NormKind.LAYER),
    )
    if description is None or scale is None or scale <= 0:
        return None
    return replace(in_parallel(description), logits_scale=float(scale))
