"""Granite 3, and dense models of Granite 4, which have fields of what their family has besides."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.architectures._granite import granite

ARCHITECTURE = GgufArchitecture(
    granite(
        "granite",
        names={"expert_shared_feed_forward_length": "intermediate_size"},
        unused=tuple(
            f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
        ),
    ),
    has_rotated_neighbours=True,
)
