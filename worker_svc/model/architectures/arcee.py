"""Arcee's AFM: Llama with an MLP without a gate, and the square of ReLU."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.attention_bias
    return describe_decoder(
        config,
        windows=Windows.NONE,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.mlp_bias,
        plain_mlp=("up_proj", "down_proj"),
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "Arcee", _describe)
