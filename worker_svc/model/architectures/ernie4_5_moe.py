"""ERNIE 4.5 with experts: a softmax chooses them with a bias, and neighbouring dimensions of heads are rotated."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_experts import ExpertForm, with_experts
from worker_svc.model.description import ModelDescription

# transformers divides by `moe_norm_min` where the sum of weights is smaller, which it is not with the usual 1e-12.
_SMALLEST_SUM = 1e-6


def _describe(config: Any) -> ModelDescription | None:
    if config.use_bias or config.moe_norm_min > _SMALLEST_SUM:
        return None
    num_shared: int = config.moe_num_shared_experts
    experts = ExpertForm(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        normalized=True,
        shared_width=num_shared * config.moe_intermediate_size or None,
        shared="shared_experts",
        has_shared_gate=False,
        choice_bias="moe_statics.e_score_correction_bias",
    )
    dense = describe_decoder(config, windows=Windows.NONE, rotates_neighbours=True)
    if dense is None:
        return None
    step, last = config.moe_layer_interval, config.moe_layer_end_index
    layers = range(max(0, config.moe_layer_start_index), min(last + 1, config.num_hidden_layers))
    sparse = [number for number in layers if (number + 1) % step == 0]
    # As transformers' modules call it.
    renamed = [(f"model.layers.{number}.mlp.gate.moe_", f"model.layers.{number}.mlp.moe_") for number in sparse]
    # Layers that predict further tokens are not computed.
    return replace(
        with_experts(dense, experts, sparse), renamed=(*dense.renamed, *renamed), unused_prefixes=("model.mtp_",)
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "Ernie4_5_Moe", _describe, classifies=False)
