"""GLM-4.7-Flash: DeepSeek-V3 with other layers that have experts."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_experts import deepseek_experts, predicting_layers, with_experts
from worker_svc.model.describe_latent import describe_latent
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    experts, dense = deepseek_experts(config), describe_latent(config, rotates_neighbours=config.rope_interleave)
    if dense is None or experts is None:
        return None
    sparse = [number for number, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]
    return replace(with_experts(dense, experts, sparse), unused_prefixes=predicting_layers(config))


ARCHITECTURE = Architecture(__file__, "Glm4MoeLiteForCausalLM", _describe, ("Glm4MoeLiteModel",))
