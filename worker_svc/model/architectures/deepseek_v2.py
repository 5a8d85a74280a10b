"""DeepSeek-V2, V2-Lite, V2.5 and Coder-V2 (arXiv:2405.04434): latent attention, and experts after the first layers."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_experts import ExpertForm, with_experts
from worker_svc.model.describe_latent import describe_latent
from worker_svc.model.description import ExpertGroups, ModelDescription

_GROUPS = {"greedy": False, "group_limited_greedy": True}


def _describe(config: Any) -> ModelDescription | None:
    has_groups = _GROUPS.get(config.topk_method)
    # transformers does not use `norm_topk_prob`; experts with biases are not described.
    if has_groups is None or config.norm_topk_prob or config.mlp_bias or not config.n_shared_experts:
        return None
    experts = ExpertForm(
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        normalized=False,
        shared_width=config.n_shared_experts * config.moe_intermediate_size,
        shared="shared_experts",
        has_shared_gate=False,
        scale=config.routed_scaling_factor,
        groups=ExpertGroups(config.n_group, config.topk_group, num_summed=1) if has_groups else None,
    )
    dense = describe_latent(config, rotates_neighbours=True)
    return dense and with_experts(dense, experts, range(config.first_k_dense_replace, config.num_hidden_layers))


ARCHITECTURE = Architecture.of_decoder(__file__, "DeepseekV2", _describe)
