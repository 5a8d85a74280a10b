"""gpt-oss (arXiv:2508.10925): attention sinks, windows in every other layer, and experts with biases.

A layer has one tensor for all experts, in which gate and up take turns. In MXFP4 it is [experts, outputs, inputs], else
[experts, inputs, outputs].
"""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_experts import describe_router
from worker_svc.model.describe_parts import describe_mlp
from worker_svc.model.description import (
    Activation,
    DecoderLayer,
    ExpertsSpec,
    MlpKind,
    MlpSpec,
    ModelDescription,
    StoredLinear,
)


def _describe(config: Any) -> ModelDescription | None:
    if (config.swiglu_alpha, config.swiglu_limit) != (1.702, 7.0):
        return None
    bias: bool = config.attention_bias
    described = describe_decoder(config, windows=Windows.BY_LAYER_TYPES, qkv_bias=bias, output_bias=bias)
    return described and replace(
        described, layers=tuple(_layer(config, number, layer) for number, layer in enumerate(described.layers))
    )


def _layer(config: Any, number: int, layer: DecoderLayer) -> DecoderLayer:
    prefix = f"model.layers.{number}."
    router = StoredLinear(f"{prefix}mlp.router", (config.num_local_experts,), bias=True)
    experts = f"{prefix}mlp.experts."
    return replace(
        layer,
        attention=replace(layer.attention, sinks=f"{prefix}self_attn.sinks"),
        mlp=ExpertsSpec(
            describe_router(config.hidden_size, router),
            config.num_experts_per_tok,
            normalized=True,
            experts=tuple(_mlp(config, f"{experts}{expert}.") for expert in range(config.num_local_experts)),
            stacked=experts,
        ),
    )


def _mlp(config: Any, prefix: str) -> MlpSpec:
    quantization = getattr(config, "quantization_config", None) or {}
    width, transposed = config.intermediate_size, quantization.get("quant_method") != "mxfp4"
    gate_up = StoredLinear(f"{prefix}gate_up_proj", (width, width), bias=True, transposed=transposed, interleaved=1)
    down = StoredLinear(f"{prefix}down_proj", (config.hidden_size,), bias=True, transposed=transposed)
    return describe_mlp(MlpKind.GATED, (gate_up,), down, Activation.SWIGLU_OAI)


ARCHITECTURE = Architecture.of_decoder(__file__, "GptOss", _describe)
