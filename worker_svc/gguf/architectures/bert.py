"""BERT and models of its form, such as MiniLM, bge, mxbai and snowflake-arctic-embed; DistilBERT too. Files of
XLM-RoBERTa have this name, too, and positions that begin with the first token's, as BERT's.
"""

from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.encoders import encoder_fields
from worker_svc.gguf.metadata import GgufMetadata


def _read_config(metadata: GgufMetadata) -> Any:
    from transformers import BertConfig

    # The activation is not in the file; llama.cpp computes this one.
    return BertConfig(**encoder_fields(metadata), hidden_act="gelu", architectures=["BertModel"])


ARCHITECTURE = GgufArchitecture(_read_config, is_embedding=True)
