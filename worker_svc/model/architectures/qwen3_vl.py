"""Qwen3-VL: the text model is that of Qwen 3. Of text alone, the three positions of a token are equal."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.attention_bias
    return describe_decoder(config, windows=Windows.NONE, qkv_bias=bias, output_bias=bias, qk_norm=True)


ARCHITECTURE = Architecture.of_text_model(__file__, "Qwen3VL", _describe)
