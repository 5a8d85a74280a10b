"""EuroBERT: Llama with attention in both directions; without a head."""

from collections.abc import Mapping
from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import ConfigForm, decoder
from worker_svc.gguf.encoders import pooling_of
from worker_svc.gguf.metadata import GgufMetadata


def _more(metadata: GgufMetadata) -> Mapping[str, Any]:
    pooling_of(metadata)
    return {"architectures": ["EuroBertModel"]}


ARCHITECTURE = GgufArchitecture(
    decoder(
        ConfigForm(
            "eurobert",
            required={"attention.causal": (False,)},
            unused=("classifier.pooling_type",),
            more=_more,
        )
    ),
    is_embedding=True,
)
