"""Command-R, Aya 23 and Aya Expanse."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_cohere import describe_cohere
from worker_svc.model.describe_decoder import Windows
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    # With `use_qk_norm`, each head of queries and keys has a layer norm of its own.
    return None if config.use_qk_norm else describe_cohere(config, Windows.NONE)


ARCHITECTURE = Architecture.of_decoder(__file__, "Cohere", _describe, classifies=False)
