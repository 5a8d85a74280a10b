"""EmbeddingGemma: Gemma 3 with attention in both directions. Files may have the layers behind the pooling."""

from collections.abc import Iterator, Mapping
from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder
from worker_svc.gguf.encoders import dense_layers, pooling_of
from worker_svc.gguf.metadata import GgufMetadata
from worker_svc.gguf.rope import RopeForm


def _more(metadata: GgufMetadata) -> Mapping[str, Any]:
    pooling_of(metadata)
    dense_layers(metadata)
    return {"use_bidirectional_attention": True, "architectures": ["Gemma3TextModel"]}


def _notes(metadata: GgufMetadata) -> Iterator[str]:
    if not dense_layers(metadata):
        yield (
            "the GGUF file has no layers behind its pooling (dense_2, dense_3): its vectors are not those of "
            "EmbeddingGemma as published. A file has them if convert_hf_to_gguf.py was given "
            "--sentence-transformers-dense-modules"
        )


ARCHITECTURE = GgufArchitecture(
    decoder(
        ConfigForm(
            "gemma3_text",
            required={"attention.causal": (False, None)},
            more=_more,
            rope=RopeForm(window_theta=10_000.0),
            window=512,
        )
    ),
    is_embedding=True,
    notes=_notes,
)
