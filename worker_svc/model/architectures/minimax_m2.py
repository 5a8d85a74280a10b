"""MiniMax-M2: DeepSeek-V3's router without groups; all queries are normalised together, and so are all keys."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_experts import ExpertForm, with_experts
from worker_svc.model.description import ExpertScores, ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    experts = ExpertForm(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        normalized=True,
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        scores=ExpertScores.SIGMOID,
        choice_bias="e_score_correction_bias",
    )
    dense = describe_decoder(config, windows=Windows.NONE, qk_norm=True, joint_qk_norm=True, partial_rotation=True)
    return dense and with_experts(dense, experts)


ARCHITECTURE = Architecture.of_decoder(__file__, "MiniMaxM2", _describe, classifies=False)
