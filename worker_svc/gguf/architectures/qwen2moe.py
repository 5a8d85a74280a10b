"""Qwen 1.5 and 2 with experts."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import decoder

ARCHITECTURE = GgufArchitecture(decoder("qwen2_moe"))
