"""ERNIE 4.5 with experts."""

from collections.abc import Mapping
from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder
from worker_svc.gguf.metadata import GgufMetadata


def _more(metadata: GgufMetadata) -> Mapping[str, Any]:
    return {"moe_layer_end_index": metadata.num_blocks - 1}


ARCHITECTURE = GgufArchitecture(
    decoder(
        ConfigForm(
            "ernie4_5_moe",
            names={
                "expert_count": "moe_num_experts",
                "expert_used_count": "moe_k",
                "expert_shared_count": "moe_num_shared_experts",
                "interleave_moe_layer_step": "moe_layer_interval",
                "leading_dense_block_count": "moe_layer_start_index",
            },
            fixed={"moe_layer_start_index": 0, "moe_num_shared_experts": 0},
            # The converter divides it by the KV heads; tensors say what it is.
            unused=("expert_shared_feed_forward_length",),
            more=_more,
        )
    )
)
