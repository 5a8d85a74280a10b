"""Qwen3-VL: files have the text model alone. Of text, the three positions of a token are equal."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder

ARCHITECTURE = GgufArchitecture(decoder(ConfigForm("qwen3", unused=("rope.dimension_sections", "n_deepstack_layers"))))
