"""Qwen3-VL with experts: the text model is that of Qwen 3 with experts, whose weights are divided by their sum."""

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
        normalized=True,  # `norm_topk_prob` is not read
        fused_may_be_transposed=True,  # as Qwen publishes them
    )
    bias: bool = config.attention_bias
    dense = describe_decoder(config, windows=Windows.NONE, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return dense and with_experts(dense, experts, sparse_layers(config))


ARCHITECTURE = Architecture.of_text_model(__file__, "Qwen3VLMoe", _describe)
