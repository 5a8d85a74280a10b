"""Granite 3 with experts: Granite's factors, and tensors of all experts of a layer."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_experts import ExpertForm, with_experts
from worker_svc.model.describe_granite import with_factors
from worker_svc.model.description import ModelDescription

# As transformers' modules call them, and as checkpoints do.
_RENAMED = (
    ("experts.gate_up_proj", "input_linear.weight"),
    ("experts.down_proj", "output_linear.weight"),
    ("router.weight", "router.layer.weight"),
)


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.attention_bias
    experts = ExpertForm(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        normalized=True,
        block="block_sparse_moe",
        router="router.layer",
        fused=("input_linear.weight", "output_linear.weight"),
    )
    dense = describe_decoder(config, windows=Windows.NONE, qkv_bias=bias, output_bias=bias)
    if dense is None:
        return None
    mixed = with_experts(dense, experts)
    blocks = [f"model.layers.{number}.block_sparse_moe." for number in range(config.num_hidden_layers)]
    renamed = tuple((f"{block}{old}", f"{block}{new}") for block in blocks for old, new in _RENAMED)
    return with_factors(replace(mixed, renamed=(*mixed.renamed, *renamed)), config)


ARCHITECTURE = Architecture.of_decoder(__file__, "GraniteMoe", _describe, classifies=False)
