"""Mixtral: Mistral with experts in every layer (arXiv:2401.04088)."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_experts import ExpertForm, with_experts
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    experts = ExpertForm(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        normalized=True,
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    dense = describe_decoder(config, windows=Windows.ALL_LAYERS)
    return dense and with_experts(dense, experts)


ARCHITECTURE = Architecture.of_decoder(__file__, "Mixtral", _describe)
