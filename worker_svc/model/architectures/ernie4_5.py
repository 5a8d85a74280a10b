"""ERNIE 4.5 without experts: Llama, of which neighbouring dimensions of heads are rotated."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.use_bias
    return describe_decoder(
        config, windows=Windows.NONE, qkv_bias=bias, output_bias=bias, mlp_bias=bias, rotates_neighbours=True
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "Ernie4_5", _describe, classifies=False)
