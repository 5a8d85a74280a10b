"""Granite 4 without experts and without layers with states, such as Micro: Granite with a fused gate, and with or
without positions.
"""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_granite import with_factors
from worker_svc.model.describe_parts import describe_mlp
from worker_svc.model.description import DecoderLayer, MlpKind, ModelDescription, StoredLinear


def _describe(config: Any) -> ModelDescription | None:
    if config.num_local_experts or set(config.layer_types) != {"full_attention"}:
        return None
    bias: bool = config.attention_bias
    described = describe_decoder(config, windows=Windows.NONE, qkv_bias=bias, output_bias=bias)
    if described is None:
        return None

    def layer(number: int, described: DecoderLayer) -> DecoderLayer:
        prefix, width, (mlp,) = f"model.layers.{number}.shared_mlp", config.shared_intermediate_size, described.mlps
        gate_up = StoredLinear(f"{prefix}.input_linear", (width, width))
        down = StoredLinear(f"{prefix}.output_linear", (config.hidden_size,))
        rope = described.attention.rope if config.position_embedding_type == "rope" else None
        return replace(
            described,
            attention=replace(described.attention, rope=rope),
            mlp=describe_mlp(MlpKind.GATED, (gate_up,), down, mlp.activation),
        )

    layers = tuple(layer(number, one) for number, one in enumerate(described.layers))
    return with_factors(replace(described, layers=layers), config)


ARCHITECTURE = Architecture.of_decoder(__file__, "GraniteMoeHybrid", _describe, classifies=False)
