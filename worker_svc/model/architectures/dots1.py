"""dots.llm1: Qwen 3's attention, and DeepSeek-V3's experts."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_experts import deepseek_experts, with_experts
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.attention_bias
    experts = deepseek_experts(config)
    dense = describe_decoder(config, windows=Windows.BY_LAYER_TYPES, qkv_bias=bias, output_bias=bias, qk_norm=True)
    if dense is None or experts is None:
        return None
    return with_experts(dense, experts, range(config.first_k_dense_replace, config.num_hidden_layers))


ARCHITECTURE = Architecture.of_decoder(__file__, "Dots1", _describe, classifies=False)
