"""Qwen 3 with experts; layers without experts may be among them."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_experts import ExpertForm, sparse_layers, with_experts
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    experts = ExpertForm(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob
    )
    bias: bool = config.attention_bias
    windows = Windows.ALL_LAYERS  # `layer_types` are not read
    dense = describe_decoder(config, windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return dense and with_experts(dense, experts, sparse_layers(config))


ARCHITECTURE = Architecture.of_decoder(__file__, "Qwen3Moe", _describe)
