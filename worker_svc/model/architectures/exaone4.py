"""EXAONE 4: norms come after attention and MLP; where some layers have a window, the others have no positions."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_exaone import describe_exaone
from worker_svc.model.describe_post_norms import with_post_norms
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    description = describe_exaone(config)
    return description and with_post_norms(description)


ARCHITECTURE = Architecture.of_decoder(__file__, "Exaone4", _describe)
