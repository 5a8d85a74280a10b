"""StarCoder2: Llama with layer norms, an MLP without a gate, and a window of keys in every layer or in none."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import layer_norms
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.use_bias
    return describe_decoder(
        config,
        windows=Windows.ALL_LAYERS,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norms=layer_norms(config.norm_epsilon),
        plain_mlp=("c_fc", "c_proj"),
    )


ARCHITECTURE = Architecture.of_decoder(__file__, "Starcoder2", _describe)
