"""GLM-4.7-Flash: DeepSeek-V3 with other layers that have experts."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_experts import deepseek_experts, layers_called_sparse, predicting_layers, with_experts
from worker_svc.model.describe_latent import describe_latent
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    experts, dense = deepseek_experts(config), describe_latent(config, rotates_neighbours=config.rope_interleave)
    if dense is None or experts is None:
        return None
    mixed = with_experts(dense, experts, layers_called_sparse(config))
    return replace(mixed, unused_prefixes=predicting_layers(config))


ARCHITECTURE = Architecture.of_decoder(__file__, "Glm4MoeLite", _describe, classifies=False)
