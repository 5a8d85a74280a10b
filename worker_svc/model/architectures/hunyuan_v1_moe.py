"""Hunyuan-A13B: the dense models' attention, and experts beside an MLP for all tokens."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_experts import ExpertForm, with_experts
from worker_svc.model.describe_hunyuan import describe_hunyuan
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    # Configs may have a number for each layer; those of one model are alike.
    chosen = [config.moe_topk] if isinstance(config.moe_topk, int) else config.moe_topk
    dense = describe_hunyuan(config)
    if dense is None or len(set(chosen)) != 1 or not isinstance(config.num_experts, int):
        return None
    experts = ExpertForm(
        config.num_experts,
        chosen[0],
        config.intermediate_size,
        normalized=True,
        shared_width=config.intermediate_size,
        shared="shared_mlp",
        has_shared_gate=False,
        router="gate.wg",
    )
    return with_experts(dense, experts)


ARCHITECTURE = Architecture.of_decoder(__file__, "HunYuanMoEV1", _describe)
