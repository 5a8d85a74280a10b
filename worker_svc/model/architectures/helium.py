"""Helium: Llama whose neighbouring dimensions are rotated."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    return describe_decoder(
        config,
        windows=Windows.NONE,
        qkv_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        rotates_neighbours=True,
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "Helium", _describe)
