"""Jais 2: Llama with layer norms, biases, and an MLP without a gate, with the square of ReLU."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import layer_norms
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.attention_bias
    return describe_decoder(
        config,
        windows=Windows.NONE,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.mlp_bias,
        norms=layer_norms(config.layer_norm_eps),
        plain_mlp=("up_proj", "down_proj"),
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "Jais2", _describe, classifies=False)
