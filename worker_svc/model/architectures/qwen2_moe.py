"""Qwen 1.5 and 2 with experts, and beside them an MLP for all tokens; layers without experts may be among them."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_experts import ExpertForm, sparse_layers, with_experts
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    experts = ExpertForm(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.norm_topk_prob,
        config.shared_expert_intermediate_size,
    )
    dense = describe_decoder(config, windows=Windows.BY_LAYER_TYPES, qkv_bias=config.qkv_bias)
    return dense and with_experts(dense, experts, sparse_layers(config))


ARCHITECTURE = Architecture.of_decoder(__file__, "Qwen2Moe", _describe)
