"""Llama 1 to 3, Mistral, SmolLM, Yi and others that llama.cpp computes as Llama, and Mixtral, which has experts."""

from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, read_decoder
from worker_svc.gguf.metadata import GgufMetadata


def _read_config(metadata: GgufMetadata) -> Any:
    return read_decoder(metadata, ConfigForm("mixtral" if metadata.peek("expert_count") else "llama"))


ARCHITECTURE = GgufArchitecture(_read_config, has_rotated_neighbours=True)
