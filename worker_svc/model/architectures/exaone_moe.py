"""K-EXAONE: EXAONE 4's attention behind norms, and DeepSeek-V3's experts."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_exaone import describe_exaone
from worker_svc.model.describe_experts import ExpertForm, layers_called_sparse, with_experts
from worker_svc.model.description import ExpertGroups, ExpertScores, ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    dense = describe_exaone(config)
    if dense is None or not config.num_shared_experts:
        return None
    experts = ExpertForm(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.norm_topk_prob,
        shared_width=config.num_shared_experts * config.moe_intermediate_size,
        shared="shared_experts",
        has_shared_gate=False,
        scale=config.routed_scaling_factor,
        scores=ExpertScores.SIGMOID,
        groups=ExpertGroups(config.n_group, config.topk_group, num_summed=2),
        choice_bias="e_score_correction_bias",
    )
    sparse = layers_called_sparse(config)
    # As transformers' modules call it.
    renamed = [(f"model.layers.{number}.mlp.gate.e_score", f"model.layers.{number}.mlp.e_score") for number in sparse]
    # Layers that predict further tokens are not computed.
    return replace(with_experts(dense, experts, sparse), renamed=(*dense.renamed, *renamed), unused_prefixes=("mtp.",))


ARCHITECTURE = Architecture(__file__, "ExaoneMoeForCausalLM", _describe, ("ExaoneMoeModel",))
