"""K-EXAONE."""

from collections.abc import Mapping
from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import SIGMOID, ConfigForm, decoder
from worker_svc.gguf.metadata import GgufMetadata


def _more(metadata: GgufMetadata) -> Mapping[str, Any]:
    first = int(metadata.get("leading_dense_block_count") or 0)
    width = metadata.needed("expert_feed_forward_length") * (metadata.peek("expert_shared_count") or 0)
    if metadata.peek("expert_shared_feed_forward_length") == width:
        metadata.get("expert_shared_feed_forward_length")
    return {"mlp_layer_types": ["dense"] * first + ["sparse"] * (metadata.num_layers - first)}


ARCHITECTURE = GgufArchitecture(
    decoder(
        ConfigForm(
            "exaone_moe",
            fixed={"norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
            required={"expert_gating_func": SIGMOID},
            window=128,
            more=_more,
        )
    )
)
