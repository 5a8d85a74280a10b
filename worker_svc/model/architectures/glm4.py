"""GLM-4-0414 and GLM-Z1: norms on both sides of attention and MLP."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_glm import describe_glm
from worker_svc.model.describe_parts import norm_called
from worker_svc.model.description import DecoderLayer, ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    description = describe_glm(config)
    return description and replace(description, layers=tuple(map(_layer, description.layers)))


def _layer(layer: DecoderLayer) -> DecoderLayer:
    return replace(
        layer,
        post_attention_norm=norm_called("post_self_attn_layernorm", layer.mlp_norm),
        post_mlp_norm=norm_called("post_mlp_layernorm", layer.mlp_norm),
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "Glm4", _describe)
