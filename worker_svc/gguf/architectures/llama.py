"""Llama 1 to 3, Mistral, SmolLM, Yi and others that llama.cpp computes as Llama."""

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import decoder

ARCHITECTURE = GgufArchitecture(decoder("llama"), has_rotated_neighbours=True)
