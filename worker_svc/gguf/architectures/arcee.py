"""AFM-4.5B."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import decoder

ARCHITECTURE = GgufArchitecture(decoder("arcee"), has_rotated_neighbours=True)
