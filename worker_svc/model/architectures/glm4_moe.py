"""GLM-4.5 and 4.6: DeepSeek-V3's experts behind grouped queries, of which a part of each head is rotated."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_experts import deepseek_experts, predicting_layers, with_experts
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    experts = deepseek_experts(config)
    dense = describe_decoder(
        config,
        windows=Windows.NONE,
        qkv_bias=config.attention_bias,
        qk_norm=config.use_qk_norm,
        partial_rotation=True,
    )
    if dense is None or experts is None:
        return None
    mixed = with_experts(dense, experts, range(config.first_k_dense_replace, config.num_hidden_layers))
    return replace(mixed, unused_prefixes=predicting_layers(config))


ARCHITECTURE = Architecture.of_decoder(__file__, "Glm4Moe", _describe, classifies=False)
