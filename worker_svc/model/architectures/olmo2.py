"""OLMo 2 (arXiv:2501.00656): norms come after attention and MLP, and queries and keys have norms of all heads."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_post_norms import with_post_norms
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.attention_bias
    description = describe_decoder(
        config, windows=Windows.NONE, qkv_bias=bias, output_bias=bias, qk_norm=True, joint_qk_norm=True
    )
    return description and with_post_norms(description)


ARCHITECTURE = Architecture.of_decoder(__file__, "Olmo2", _describe)
