"""BERT and models of its form, such as MiniLM, bge, mxbai and snowflake-arctic-embed; DistilBERT too. Files of
XLM-RoBERTa have this name, too, and positions that begin with the first token's, as BERT's. Those of its rerankers have
a head.
"""

from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.encoders import encoder_fields, has_score_head, labels_of
from worker_svc.gguf.metadata import GgufMetadata

# Of a head, whose first layer is that of BERT's pooler.
_HEAD = {
    **{f"bert.pooler.dense.{kind}": f"cls.{kind}" for kind in ("weight", "bias")},
    **{f"classifier.{kind}": f"cls.output.{kind}" for kind in ("weight", "bias")},
}


def _read_config(metadata: GgufMetadata) -> Any:
    from transformers import BertConfig

    # The activation is not in the file; llama.cpp computes this one.
    fields = encoder_fields(metadata) | {"hidden_act": "gelu", "architectures": ["BertModel"]}
    if has_score_head(metadata):
        fields |= {"id2label": labels_of(metadata), "architectures": ["BertForSequenceClassification"]}
    return BertConfig(**fields)


ARCHITECTURE = GgufArchitecture(_read_config, names=_HEAD, is_embedding=True)
