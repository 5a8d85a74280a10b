"""StableLM: Llama with layer norms, and rotary positions of a part of each head."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_parts import in_parallel, layer_norms
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    if config.qk_layernorm:
        return None  # each head has a layer norm of its own
    description = describe_decoder(
        config,
        windows=Windows.NONE,
        qkv_bias=config.use_qkv_bias,
        partial_rotation=True,
        norms=layer_norms(config.layer_norm_eps),
    )
    return in_parallel(description) if description and config.use_parallel_residual else description


ARCHITECTURE = Architecture.of_decoder(__file__, "StableLm", _describe)
