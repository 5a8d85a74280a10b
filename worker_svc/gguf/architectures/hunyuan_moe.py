"""Hunyuan-A13B: experts are as wide as the MLP for all tokens."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder

ARCHITECTURE = GgufArchitecture(
    decoder(
        ConfigForm(
            "hunyuan_v1_moe",
            names={
                "expert_used_count": "moe_topk",
                "expert_feed_forward_length": "intermediate_size",
            },
            required={"expert_shared_count": (None, 1)},
            unused=("expert_shared_feed_forward_length",),
        )
    )
)
