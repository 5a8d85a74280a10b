"""Granite 3: Llama with factors of embeddings, of what layers add, of scores and of logits."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_granite import with_factors
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.attention_bias
    described = describe_decoder(
        config, windows=Windows.NONE, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias
    )
    return described and with_factors(described, config)


ARCHITECTURE = Architecture.of_decoder(__file__, "Granite", _describe, classifies=False)
