"""Qwen 3: queries and keys are normalised head by head."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.attention_bias
    windows = Windows.BY_LAYER_TYPES
    return describe_decoder(config, windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True)


ARCHITECTURE = Architecture.of_decoder(__file__, "Qwen3", _describe)
