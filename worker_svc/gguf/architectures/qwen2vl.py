"""Qwen2-VL and Qwen2.5-VL: files have the text model alone. Of text, the three positions of a token are equal."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import decoder

ARCHITECTURE = GgufArchitecture(decoder("qwen2", unused=("rope.dimension_sections",)))
