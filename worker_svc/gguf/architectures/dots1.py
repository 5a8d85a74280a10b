"""dots.llm1: Qwen 3's attention, and DeepSeek-V3's experts."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import SIGMOID, ConfigForm, decoder

ARCHITECTURE = GgufArchitecture(
    decoder(
        ConfigForm(
            "dots1",
            fixed={"norm_topk_prob": False, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
            required={"expert_gating_func": SIGMOID},
        )
    )
)
