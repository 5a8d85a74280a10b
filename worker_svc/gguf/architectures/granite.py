"""Granite 3."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.architectures._granite import granite

ARCHITECTURE = GgufArchitecture(granite("granite"), has_rotated_neighbours=True)
