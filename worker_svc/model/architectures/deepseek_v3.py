"""DeepSeek-V3 and R1 (arXiv:2412.19437): V2 with sigmoids in the router, and a bias that balances the experts."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_experts import ExpertForm, with_experts
from worker_svc.model.describe_latent import describe_latent
from worker_svc.model.description import ExpertGroups, ExpertScores, ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    if not config.n_shared_experts:
        return None
    num_layers: int = config.num_hidden_layers
    experts = ExpertForm(
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.norm_topk_prob,
        shared_width=config.n_shared_experts * config.moe_intermediate_size,
        shared="shared_experts",
        has_shared_gate=False,
        scale=config.routed_scaling_factor,
        scores=ExpertScores.SIGMOID,
        groups=ExpertGroups(config.n_group, config.topk_group, num_summed=2),
        choice_bias="e_score_correction_bias",
    )
    dense = describe_latent(config, rotates_neighbours=config.rope_interleave)
    if dense is None:
        return None
    # The layers behind the last one predict further tokens; they are not computed.
    unused = tuple(f"model.layers.{num_layers + number}." for number in range(config.num_nextn_predict_layers))
    mixed = with_experts(dense, experts, range(config.first_k_dense_replace, num_layers))
    return replace(mixed, unused_prefixes=unused)


ARCHITECTURE = Architecture.of_decoder(__file__, "DeepseekV3", _describe)
