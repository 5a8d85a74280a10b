"""Nemotron-4 and Minitron: Llama with layer norms, an MLP without a gate, and partial rotary positions."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import NormForm
from worker_svc.model.description import ModelDescription, NormKind


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.attention_bias
    return describe_decoder(
        config,
        windows=Windows.NONE,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.mlp_bias,
        partial_rotation=True,
        norms=NormForm(config.norm_eps, NormKind.LAYER, weight_offset=1.0, has_bias=True),
        plain_mlp=("up_proj", "down_proj"),
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "Nemotron", _describe)
