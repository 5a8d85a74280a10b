"""Gemma 1: Llama with weights of norms stored as their distance from 1, and a scaled embedding."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import NormForm
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    if config.use_bidirectional_attention:
        return None  # of which transformers makes no mask
    bias: bool = config.attention_bias
    norms = NormForm(config.rms_norm_eps, weight_offset=1.0)
    described = describe_decoder(config, windows=Windows.NONE, qkv_bias=bias, output_bias=bias, norms=norms)
    scale = float(config.hidden_size**0.5)
    return described and replace(described, embedding_scale=scale, rounds_embedding_scale=True)


ARCHITECTURE = Architecture.of_decoder(__file__, "Gemma", _describe)
