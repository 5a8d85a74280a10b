"""StableLM: Llama with layer norms, and rotary positions of a part of each head."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import NormForm
from worker_svc.model.description import DecoderLayer, ModelDescription, NormKind


def _describe(config: Any) -> ModelDescription | None:
    if config.qk_layernorm:
        return None  # each head has a layer norm of its own
    description = describe_decoder(
        config,
        windows=Windows.NONE,
        qkv_bias=config.use_qkv_bias,
        partial_rotation=True,
        norms=NormForm(config.layer_norm_eps, NormKind.LAYER, has_bias=True),
    )
    if description is None or not config.use_parallel_residual:
        return description
    return replace(description, layers=tuple(map(_parallel, description.layers)))


def _parallel(layer: DecoderLayer) -> DecoderLayer:
    assert layer.attention_norm is not None
    return replace(layer, mlp_norm=layer.attention_norm, parallel=True)


ARCHITECTURE = Architecture.of_decoder(__file__, "StableLm", _describe)
