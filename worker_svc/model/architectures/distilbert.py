"""DistilBERT: BERT with tokens of one type, and other names."""

from typing import Any

from worker_svc.model.architecture import Architecture
from worker_svc.model.describe_encoder import EncoderNames, HeadNames, describe_encoder
from worker_svc.model.encoder_description import EncoderDescription
from worker_svc.model.score_head_description import DenseActivation

_NAMES = EncoderNames(
    "distilbert",
    layers="transformer.layer",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    gate_up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)
_HEAD = HeadNames("pre_classifier", "classifier", DenseActivation.RELU)


def _describe(config: Any) -> EncoderDescription | None:
    return describe_encoder(
        config, _NAMES, _HEAD, eps=1e-12, activation=config.activation, width=config.hidden_dim, num_types=0
    )


ARCHITECTURE = Architecture.of_encoder(__file__, "DistilBert", _describe)
