"""Qwen3-VL with experts: as `qwen3vl` and `qwen3moe`."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder

ARCHITECTURE = GgufArchitecture(
    decoder(
        ConfigForm(
            "qwen3_moe", fixed={"norm_topk_prob": True}, unused=("rope.dimension_sections", "n_deepstack_layers")
        )
    )
)
