"""Command-R7B and Command A: layers with a window have rotary positions, and those without have none."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_cohere import describe_cohere
from worker_svc.model.describe_decoder import Windows
from worker_svc.model.describe_parts import with_positions_where
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    if config.sliding_window is None:
        return None
    description = describe_cohere(config, Windows.BY_LAYER_TYPES)
    return description and with_positions_where(
        description, (kind == "sliding_attention" for kind in config.layer_types)
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "Cohere2", _describe, classifies=False)
