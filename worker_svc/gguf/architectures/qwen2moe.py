"""Qwen 1.5 and 2 with experts."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder

ARCHITECTURE = GgufArchitecture(decoder(ConfigForm("qwen2_moe")))
