"""HyperCLOVA X SEED: Granite, whose logits are multiplied by the factor that divides them there, and with norms on both
sides of attention and MLP in most models.
"""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_granite import with_factors
from worker_svc.model.describe_parts import NormForm
from worker_svc.model.description import DecoderLayer, ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias, norms = config.attention_bias, NormForm(config.rms_norm_eps)
    dense = describe_decoder(config, windows=Windows.NONE, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)
    described = dense and with_factors(dense, config)
    if described is None:
        return None

    def layer(number: int, described: DecoderLayer) -> DecoderLayer:
        first, second = (norms.norm(f"model.layers.{number}.post_norm{one}", config.hidden_size) for one in (1, 2))
        return replace(described, post_attention_norm=first, post_mlp_norm=second)

    if config.use_post_norm:
        layers = tuple(layer(number, one) for number, one in enumerate(described.layers))
        described = replace(described, layers=layers)
    return replace(described, logits_scale=float(config.logits_scaling))


ARCHITECTURE = Architecture.of_decoder(__file__, "HyperCLOVAX", _describe, classifies=False)
