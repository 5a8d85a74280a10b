"""BERT and models of its form, such as MiniLM, bge, mxbai and snowflake-arctic-embed; DistilBERT too. Files of
XLM-RoBERTa have this name, too, and positions that begin with the first token's, as BERT's. Those of its rerankers have
a head.
"""

from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.encoders import HEAD, encoder_fields, has_score_head
from worker_svc.gguf.metadata import GgufMetadata

_LABELS = "classifier.output_labels"
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
        fields |= {"id2label": _labels(metadata), "architectures": ["BertForSequenceClassification"]}
    return BertConfig(**fields)


def _labels(metadata: GgufMetadata) -> dict[int, str]:
    """Of the outputs of a head."""
    count, names = metadata.num_rows(HEAD), metadata.get(_LABELS)
    # Several equal values are one.
    names = [names] if isinstance(names, str) else names or [f"LABEL_{number}" for number in range(count)]
    if len(names) != count:
        raise metadata.not_read(_LABELS)
    return dict(enumerate(names))


ARCHITECTURE = GgufArchitecture(_read_config, names=_HEAD, is_embedding=True)
