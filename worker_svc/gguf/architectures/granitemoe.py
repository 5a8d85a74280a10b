"""Granite 3 with experts."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.architectures._granite import granite

ARCHITECTURE = GgufArchitecture(
    granite("granitemoe"),
    names={
        f"block_sparse_moe.experts.{name}_proj.weight": f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")
    },
    has_rotated_neighbours=True,
)
