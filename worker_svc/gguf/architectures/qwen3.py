"""Qwen 3."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder

ARCHITECTURE = GgufArchitecture(decoder(ConfigForm("qwen3")))
