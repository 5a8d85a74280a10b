"""DeepSeek-V3 and R1 (arXiv:2412.19437): V2 with sigmoids in the router, and a bias that balances the experts."""

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
    mixed = with_experts(dense, experts, range(config.first_k_dense_replace, config.num_hidden_layers))
    return replace(mixed, unused_prefixes=predicting_layers(config))


ARCHITECTURE = Architecture.of_decoder(__file__, "DeepseekV3", _describe)
