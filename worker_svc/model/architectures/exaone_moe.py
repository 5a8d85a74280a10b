"""K-EXAONE: EXAONE 4's attention behind norms, and DeepSeek-V3's experts."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_exaone import describe_exaone
from worker_svc.model.describe_experts import deepseek_experts, layers_called_sparse, with_experts
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    experts, dense = deepseek_experts(config, ("num_experts", "num_shared_experts")), describe_exaone(config)
    if dense is None or experts is None:
        return None
    sparse = layers_called_sparse(config)
    # As checkpoints call it.
    renamed = [(f"model.layers.{number}.mlp.e_score", f"model.layers.{number}.mlp.gate.e_score") for number in sparse]
    # Layers that predict further tokens are not computed.
    return replace(with_experts(dense, experts, sparse), renamed=(*dense.renamed, *renamed), unused_prefixes=("mtp.",))


ARCHITECTURE = Architecture.of_decoder(__file__, "ExaoneMoe", _describe, classifies=False)
