"""Nomic BERT, such as nomic-embed-text-v1.5; not with experts (`nomic-bert-moe`)."""

from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.encoders import encoder_fields
from worker_svc.gguf.metadata import GgufMetadata
from worker_svc.gguf.rope import RopeForm, read_rope


def _read_config(metadata: GgufMetadata) -> Any:
    from transformers import NomicBertConfig

    config = NomicBertConfig(**encoder_fields(metadata), architectures=["NomicBertModel"])
    read_rope(metadata, config, config.hidden_size // config.num_attention_heads, RopeForm())
    return config


ARCHITECTURE = GgufArchitecture(_read_config, is_embedding=True)
