"""Youtu-LLM: latent attention as DeepSeek-V3's, and no experts."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_latent import describe_latent
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    return describe_latent(config, rotates_neighbours=config.rope_interleave)


ARCHITECTURE = Architecture.of_decoder(__file__, "Youtu", _describe, classifies=False)
