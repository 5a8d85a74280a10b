"""EXAONE 4."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import decoder

ARCHITECTURE = GgufArchitecture(decoder("exaone4"))
