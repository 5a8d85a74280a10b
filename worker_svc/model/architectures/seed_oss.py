"""Seed-OSS: Llama with biases of queries, keys and values, and a bias of its own for the output of attention."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    return describe_decoder(
        config,
        windows=Windows.NONE,
        qkv_bias=config.attention_bias,
        output_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "SeedOss", _describe)
