"""EuroBERT: Llama whose tokens see later ones."""

from dataclasses import replace
from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_decoder import Windows, describe_decoder
from worker_svc.model.describe_directions import in_both_directions
from worker_svc.model.describe_score_head import describe_score_head, has_score_head
from worker_svc.model.description import ModelDescription
from worker_svc.model.score_head_description import DenseActivation, ScoreHeadSpec


def _describe(config: Any) -> ModelDescription | None:
    has_head = has_score_head(config)
    if has_head and config.classifier_pooling not in ("bos", "mean"):  # "late": the mean of all tokens' labels
        return None
    bias: bool = config.attention_bias
    decoder = describe_decoder(config, windows=Windows.NONE, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)
    return decoder and replace(
        in_both_directions(decoder),
        tied_embeddings=True,
        # Of heads: that of pre-training, and that for sequences, which `score_head.py` reads.
        unused_prefixes=("lm_head.", "dense.", "classifier."),
        is_encoder=True,
        score_head=_score_head(config) if has_head else None,
    )


def _score_head(config: Any) -> ScoreHeadSpec:
    head = describe_score_head(config, "classifier", "dense", DenseActivation.GELU)
    return replace(head, of_mean=config.classifier_pooling == "mean")


ARCHITECTURE = Architecture.of_encoder(__file__, "EuroBert", _describe)
