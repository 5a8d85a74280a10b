"""Qwen 3 with experts, whose weights are divided by their sum."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder

ARCHITECTURE = GgufArchitecture(decoder(ConfigForm("qwen3_moe", fixed={"norm_topk_prob": True})))
