"""OLMoE (arXiv:2409.02060): experts in every layer; all queries are normalised together, and so are all keys."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_experts import ExpertForm, with_experts
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    if config.clip_qkv is not None:
        return None
    experts = ExpertForm(
        config.num_experts, config.num_experts_per_tok, config.intermediate_size, config.norm_topk_prob
    )
    bias: bool = config.attention_bias
    dense = describe_decoder(
        config, windows=Windows.NONE, qkv_bias=bias, output_bias=bias, qk_norm=True, joint_qk_norm=True
    )
    return dense and with_experts(dense, experts)


ARCHITECTURE = Architecture.of_decoder(__file__, "Olmoe", _describe, classifies=False)
