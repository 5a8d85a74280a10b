"""MiniMax-M2."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import SIGMOID, ConfigForm, decoder
from worker_svc.gguf.rope import RopeForm

ARCHITECTURE = GgufArchitecture(
    decoder(
        ConfigForm(
            "minimax_m2",
            names={"expert_feed_forward_length": "intermediate_size"},
            required={"expert_gating_func": SIGMOID},
            rope=RopeForm(is_partial=True),
        )
    )
)
