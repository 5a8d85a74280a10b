"""Command-R7B and Command A."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import decoder

ARCHITECTURE = GgufArchitecture(decoder("cohere2"))
