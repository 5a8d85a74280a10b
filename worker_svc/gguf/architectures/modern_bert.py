"""ModernBERT and models of its form, such as gte-modernbert and granite-embedding R2, and their rerankers."""

from typing import Any

from worker_svc.gguf.architecture import GgufArchitecture
from worker_svc.gguf.config import window_kinds
from worker_svc.gguf.encoders import encoder_fields, has_score_head, labels_of
from worker_svc.gguf.metadata import GgufMetadata
from worker_svc.gguf.rope import RopeForm, read_rope

_HEAD = {"head.dense": "cls", "head.norm": "cls.norm", "classifier": "cls.output"}
_ACTIVATIONS = {
    None: "gelu", "gelu": "gelu", "geglu": "gelu", "silu": "silu", "swish": "silu", "swiglu": "silu",
}  # fmt: skip
# What llama.cpp computes if a file does not say it: each third layer sees all tokens, and heads take the mean.
_EACH_FULL, _POOLINGS = 3, {None: "mean", 1: "mean", 2: "cls"}


def _read_config(metadata: GgufMetadata) -> Any:
    from transformers import ModernBertConfig

    fields = encoder_fields(metadata, tokenizers=("gpt2",))
    for of_bert in ("layer_norm_eps", "type_vocab_size"):
        fields.pop(of_bert)
    if (pooling := metadata.get("classifier.pooling_type")) not in _POOLINGS:
        raise metadata.not_read("classifier.pooling_type")
    if (activation := metadata.get("hidden_activation")) not in _ACTIVATIONS:
        raise metadata.not_read("hidden_activation")
    if has_head := has_score_head(metadata):
        fields |= {"id2label": labels_of(metadata), "classifier_bias": metadata.has("cls.bias")}
    else:
        for of_pre_training in ("cls.weight", "cls.bias", "cls.norm.weight"):
            metadata.ignore_tensor(of_pre_training)
    fields["classifier_pooling"] = _POOLINGS[pooling]
    for unused in ("vocab_size", "attention.layer_norm_rms_epsilon"):  # that of the rows, and no such norm
        metadata.get(unused)
    config = ModernBertConfig(
        **fields,
        **_windows(metadata),
        architectures=["ModernBertForSequenceClassification" if has_head else "ModernBertModel"],
        norm_eps=metadata.needed("attention.layer_norm_epsilon"),
        hidden_activation=_ACTIVATIONS[activation],
    )
    read_rope(metadata, config, config.hidden_size // config.num_attention_heads, RopeForm())
    return config


def _windows(metadata: GgufMetadata) -> dict[str, Any]:
    """Which layers have a window, and how many tokens it has on both sides of the query's own."""
    window, pattern = (metadata.get(f"attention.sliding_window{part}") for part in ("", "_pattern"))
    if not window:
        return {"layer_types": ["full_attention"] * metadata.num_layers}
    if not isinstance(window, int):
        raise metadata.not_read("attention.sliding_window")
    pattern = _EACH_FULL if pattern is None else pattern
    kinds = window_kinds(metadata, pattern, metadata.num_layers, begins_without=True)
    return {"local_attention": window, "layer_types": kinds}


ARCHITECTURE = GgufArchitecture(
    _read_config,
    names={f"{ours}.{kind}": f"{name}.{kind}" for ours, name in _HEAD.items() for kind in ("weight", "bias")},
    is_embedding=True,
    frames_pairs=True,
)
