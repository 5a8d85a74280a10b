"""Describes the attention of EXAONE 4: where some layers have a window, the others have no positions."""

from typing import Any

from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import with_positions_where
from worker_svc.model.description import ModelDescription


def describe_exaone(config: Any) -> ModelDescription | None:
    """The description with norms before attention and MLP; None: it cannot hold activation or positions."""
    description = describe_decoder(config, windows=Windows.BY_LAYER_TYPES, qk_norm=True)
    if description is None or config.sliding_window is None:
        return description
    return with_positions_where(description, (kind == "sliding_attention" for kind in config.layer_types))
