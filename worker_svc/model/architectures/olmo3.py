"""OLMo 3: OLMo 2, some of whose layers have a window and rotary positions of their own."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_post_norms import with_post_norms
from worker_svc.model.description import ModelDescription


def _describe(config: Any) -> ModelDescription | None:
    bias: bool = config.attention_bias
    description = describe_decoder(
        config, windows=Windows.BY_LAYER_TYPES, qkv_bias=bias, output_bias=bias, qk_norm=True, joint_qk_norm=True
    )
    return description and with_post_norms(description)


ARCHITECTURE = Architecture.of_decoder(__file__, "Olmo3", _describe)
