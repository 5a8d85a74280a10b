"""CWM (arXiv:2510.02387): Llama, most of whose layers have a window."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    return describe_decoder(config, windows=Windows.BY_LAYER_TYPES, mlp_bias=config.mlp_bias)


ARCHITECTURE = Architecture.of_decoder(__file__, "Cwm", _describe, classifies=False)
