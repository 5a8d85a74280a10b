"""GLM-4.5 to 4.7. Of text, the three positions of a token of GLM-4.5V are equal."""

import re
from collections.abc import Mapping
from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import SIGMOID, ConfigForm, decoder, has_bias
from worker_svc.gguf.metadata import GgufMetadata


def _more(metadata: GgufMetadata) -> Mapping[str, Any]:
    return {"use_qk_norm": metadata.has_tensor(re.compile(r"blk\.\d+\.attn_q_norm\.weight"))}


ARCHITECTURE = GgufArchitecture(
    decoder(
        ConfigForm(
            "glm4_moe",
            fixed={"norm_topk_prob": False, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
            required={"expert_gating_func": (None, 0, *SIGMOID)},
            biases={"attention_bias": has_bias("attn_q", "attn_k", "attn_v")},
            unused=("rope.dimension_sections",),
            more=_more,
        )
    )
)
